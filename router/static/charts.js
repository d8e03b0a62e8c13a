// Curves as SVG path data. Pure.

/** The top of an axis: a little above what it has to hold. */
export function axisTop(values, target) {
  const highest = Math.max(0, ...values.filter((value) => value !== null));
  return Math.max(highest * 1.15, target > highest * 6 ? highest * 1.15 : target * 1.15) || 1;
}

/** A line through the values, left to right; null leaves a gap, a lone point becomes a dash. */
export function linePath(values, width, height, top) {
  const step = values.length > 1 ? width / (values.length - 1) : width;
  const y = (value) => (height - (Math.min(value, top) / top) * height).toFixed(1);
  let path = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const x = (index * step).toFixed(1);
    const isFirst = index === 0 || values[index - 1] === null;
    path += `${isFirst ? "M" : "L"}${x} ${y(value)}`;
    const isAlone = isFirst && (index === values.length - 1 || values[index + 1] === null);
    if (isAlone) path += `h${(step / 2).toFixed(1)}`;
  });
  return path;
}

/** A level line, or nothing if it lies above the picture. */
export function levelPath(value, width, height, top) {
  return value > top ? "" : `M0 ${(height - (value / top) * height).toFixed(1)}H${width}`;
}
