// Two helpers for the document: make an element, and write a text only where it changed.

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
