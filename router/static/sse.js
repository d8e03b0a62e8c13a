// Server-sent events from a response body. Pure: text in, data out.

export class SseParser {
  #rest = "";
  #data = [];

  /** The `data` of every event that `text` completes; comments and other fields are skipped. */
  push(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}
