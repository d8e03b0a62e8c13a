// The little Markdown that answers use, as a tree. Pure: text in, plain objects out; nothing is ever HTML.

const FENCE = /^\s*(```|~~~)/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d{1,3}[.)]\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;

/** [{kind: "p" | "pre" | "ul" | "ol" | "h", text | items}]; an open fence runs to the end. */
export function blocks(text) {
  const found = [];
  let code = null;
  for (const line of text.split("\n")) {
    if (code !== null) {
      if (FENCE.test(line)) code = null;
      else code.text += (code.isEmpty ? "" : "\n") + line;
      if (code) code.isEmpty = false;
      continue;
    }
    const last = found.at(-1);
    const item = BULLET.exec(line) ?? NUMBER.exec(line);
    if (FENCE.test(line)) {
      code = { kind: "pre", text: "", isEmpty: true };
      found.push(code);
    } else if (line.trim() === "") {
      if (last) last.isClosed = true;
    } else if (HEADING.test(line)) {
      found.push({ kind: "h", text: HEADING.exec(line)[1], isClosed: true });
    } else if (item) {
      const kind = BULLET.test(line) ? "ul" : "ol";
      if (last?.kind === kind) last.items.push(item[1]);
      else found.push({ kind, items: [item[1]] });
    } else if (last?.kind === "p" && !last.isClosed) {
      last.text += "\n" + line;
    } else {
      found.push({ kind: "p", text: line });
    }
  }
  return found;
}

/** [{kind: "text" | "code" | "strong", text}] of one line or paragraph. */
export function inlines(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*/g)) {
    if (match.index > at) found.push({ kind: "text", text: text.slice(at, match.index) });
    found.push(match[1] === undefined ? { kind: "strong", text: match[2] } : { kind: "code", text: match[1] });
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push({ kind: "text", text: text.slice(at) });
  return found;
}
