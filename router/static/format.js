// Numbers as people read them. Pure.

/** 0.0842 → "84 ms", 1.239 → "1.24 s", 75 → "75 s"; null → "–". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  return `${Math.round(seconds)} s`;
}

/** 950 → "950", 12345 → "12.3k", 4200000 → "4.2M". */
export function count(number) {
  if (number < 9999.5) return String(Math.round(number));
  if (number < 999950) return `${(number / 1000).toFixed(1)}k`;
  return `${(number / 1e6).toFixed(1)}M`;
}

/** 3.14159 → "3.1", 41.7 → "42"; rates. */
export function rate(number) {
  return number < 9.95 ? number.toFixed(1) : count(number);
}

/** 0.984 → "98.4 %", 1 → "100 %", null → "–". Never rounds up to 100. */
export function percent(part) {
  if (part === null || part === undefined) return "–";
  if (part >= 1) return "100 %";
  return `${Math.min(99.9, part * 100).toFixed(part < 0.1 ? 1 : part < 0.995 ? 0 : 1)} %`;
}

/** "chatcmpl-4f3a…" → "4f3a…", six characters. */
export function shortId(id) {
  const tail = id.slice(id.indexOf("-") + 1);
  return tail.length > 8 ? tail.slice(0, 6) : tail;
}

/** 1 → "1 request", 2 → "2 requests". */
export function plural(number, noun, several = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : several}`;
}
