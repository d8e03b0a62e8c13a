// The chat: sends the conversation, shows the answer while it comes, and where its time went.

import { Answer, errorText, requestBody, ServerError } from "./answer.js";
import { make } from "./dom.js";
import { duration, plural, rate } from "./format.js";
import { blocks, inlines } from "./markdown.js";
import { SseParser } from "./sse.js";

const by = (id) => document.getElementById(id);

export class Chat {
  #messages = [];
  #model = null;
  #abort = null; // of the answer being written

  constructor() {
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(by("question").value);
    });
    by("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#ask(by("question").value);
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#abort?.abort();
    });
    by("stop").addEventListener("click", () => this.#abort?.abort());
    by("new-chat").addEventListener("click", () => this.#clear());
    for (const idea of by("ideas").querySelectorAll("button")) {
      idea.addEventListener("click", () => this.#ask(idea.textContent));
    }
  }

  set model(name) {
    this.#model = name;
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    by("log").replaceChildren(by("welcome"));
    by("welcome").hidden = false;
    by("question").focus();
  }

  async #ask(question) {
    if (this.#abort || !question.trim()) return;
    by("question").value = "";
    by("welcome").hidden = true;
    const messages = this.#messages;
    messages.push({ role: "user", content: question });
    const user = make("div", "turn user");
    user.append(make("div", "text", question));
    const turn = make("div", "turn answer");
    turn.setAttribute("aria-busy", "true");
    turn.append(make("div", "text"));
    by("log").append(user, turn);
    by("log").scrollTop = by("log").scrollHeight;
    await this.#receive(messages, turn);
  }

  async #receive(messages, turn) {
    this.#abort = new AbortController();
    this.#showBusy(true);
    const answer = new Answer(performance.now());
    const painter = new Painter(turn.firstChild);
    let trouble = null;
    try {
      await this.#stream(messages, answer, () => painter.paint(answer.text));
    } catch (error) {
      if (error.name !== "AbortError") trouble = error;
    }
    painter.finish(answer.text);
    turn.setAttribute("aria-busy", "false");
    this.#abort = null;
    this.#showBusy(false);
    const isKept = messages === this.#messages;
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else if (isKept) messages.pop();
    this.#close(turn, answer, trouble);
  }

  async #stream(messages, answer, onText) {
    const key = by("key").value;
    const options = {
      system: by("system").value,
      temperature: by("temperature").value,
      maxTokens: by("max-tokens").value,
    };
    const response = await fetch(new URL("v1/chat/completions", document.baseURI), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify(requestBody(this.#model ?? undefined, messages, options)),
      signal: this.#abort.signal,
    });
    if (!response.ok) throw new ServerError(errorText(response.status, await response.text()));
    const parser = new SseParser();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      for (const data of parser.push(value)) answer.take(data, performance.now());
      onText();
    }
    if (!answer.isDone) throw new ServerError("The answer broke off.");
  }

  #close(turn, answer, trouble) {
    if (trouble) {
      const isOurs = trouble instanceof ServerError;
      turn.append(make("p", "error", isOurs ? trouble.message : "The server cannot be reached."));
    } else if (!answer.isDone) {
      turn.append(make("p", "timing", "Stopped."));
    }
    const said = timingLine(answer);
    if (said) {
      const timing = make("div", "timing");
      const stages = answer.stages();
      if (stages.length) timing.append(stageBar(stages));
      timing.append(make("div", "", said));
      if (stages.length) timing.append(stageParts(stages));
      turn.append(timing);
    }
    by("said").textContent = trouble ? `No answer: ${trouble.message}` : `Answer complete. ${said}`;
    by("log").scrollTop = by("log").scrollHeight;
  }

  #showBusy(isBusy) {
    const [leaving, coming] = isBusy ? [by("send"), by("stop")] : [by("stop"), by("question")];
    const hadFocus = document.activeElement === leaving;
    by("stop").hidden = !isBusy;
    if (hadFocus) coming.focus({ preventScroll: true });
    by("send").hidden = isBusy;
  }
}

/** Shows text as it grows, at most once per frame, and follows it unless the reader scrolled away. */
class Painter {
  #target;
  #frame = 0;

  constructor(target) {
    this.#target = target;
  }

  paint(text) {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw(text));
  }

  finish(text) {
    cancelAnimationFrame(this.#frame);
    this.#draw(text);
  }

  #draw(text) {
    const log = by("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    const drawn = blocks(text).map(blockElement);
    // All but the last two blocks are as they were: leave them, and whatever is selected in them.
    const old = [...this.#target.children];
    const keep = Math.max(0, Math.min(old.length, drawn.length) - 2);
    for (const element of old.slice(keep)) element.remove();
    this.#target.append(...drawn.slice(keep));
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

function blockElement(block) {
  if (block.kind === "pre") {
    const pre = make("pre");
    pre.tabIndex = 0; // so that it can be scrolled with the keyboard
    pre.append(make("code", "", block.text));
    return pre;
  }
  if (block.kind === "ul" || block.kind === "ol") {
    const list = make(block.kind);
    for (const text of block.items) {
      const item = make("li");
      item.append(...inlines(text).map(inlineNode));
      list.append(item);
    }
    return list;
  }
  const element = make(block.kind === "h" ? "h4" : "p");
  element.append(...inlines(block.text).map(inlineNode));
  return element;
}

function inlineNode({ kind, text }) {
  return kind === "text" ? document.createTextNode(text) : make(kind, "", text);
}

function timingLine(answer) {
  const facts = answer.facts();
  if (facts.ttft === null) return "";
  const parts = [
    `first token ${duration(facts.ttft)}`,
    facts.tpot === null ? null : `${duration(facts.tpot)} per token (${rate(facts.perSecond)}/s)`,
    `${plural(facts.numTokens, "token")} in ${duration(facts.total)}`,
    answer.isCut ? "cut short: it reached its longest length" : null,
    facts.promptTokens === null ? null : `prompt ${facts.promptTokens}${facts.cachedTokens ? `, ${facts.cachedTokens} cached` : ""}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function stageBar(stages) {
  const bar = make("div", "stages");
  bar.setAttribute("aria-hidden", "true");
  for (const { stage, seconds } of stages) {
    const part = make("i");
    part.dataset.stage = stage;
    part.style.setProperty("flex-grow", String(Math.max(seconds, 0.0005)));
    bar.append(part);
  }
  return bar;
}

function stageParts(stages) {
  const parts = make("div", "parts");
  for (const { stage, seconds, worker } of stages) {
    const part = make("span", "", `${stage} ${duration(seconds)}${worker ? ` on ${worker}` : ""}`);
    part.dataset.stage = stage;
    parts.append(part);
  }
  return parts;
}
