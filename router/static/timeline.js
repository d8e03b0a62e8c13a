// Requests of the last half minute: lanes on a canvas that slides with time, and the same as a table.

import { make, write } from "./dom.js";
import { duration, plural, shortId } from "./format.js";
import { bars, describe, laneEnd, Rows, stageSeconds, STAGES, stateOf } from "./lanes.js";

const by = (id) => document.getElementById(id);
const SPAN_S = 30;
const NUM_ROWS = 22;
const AXIS_PX = 20;
const FRAME_MS = 33;
const STILL_FRAME_MS = 1000; // for those who asked for less motion
const TABLE_ROWS = 60;
const THIN_PX = 2.5;
const ORDER = { queue: 0, decode: 1, prefill: 2, transfer: 3 };

export class Timeline {
  #canvas = by("lanes");
  #rows = new Rows(NUM_ROWS);
  #lanes = new Map();
  #clock = null;
  #lastFrame = -Infinity;
  #boxes = []; // what the pointer can meet: {lane, x, y, width, height}
  #pointer = null;
  #isTable = false;
  #isStale = true; // there is something new to draw
  #still = matchMedia("(prefers-reduced-motion: reduce)");
  colours = {};

  constructor() {
    by("as-table").addEventListener("click", () => this.#toggle());
    this.#canvas.addEventListener("pointermove", (event) => {
      this.#pointer = { x: event.offsetX, y: event.offsetY };
      this.#showTip();
    });
    this.#canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.#showTip();
    });
    new ResizeObserver(() => {
      this.#isStale = true;
    }).observe(this.#canvas);
    this.readColours();
    requestAnimationFrame((at) => this.#frame(at));
  }

  readColours() {
    const probe = make("i");
    document.body.append(probe);
    for (const name of [...STAGES, "line", "muted", "alarm"]) {
      probe.style.setProperty("color", `var(--${name})`);
      this.colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.#isStale = true;
  }

  show(picture, clock) {
    this.#lanes = picture.lanes;
    this.#clock = clock;
    this.#isStale = true;
    const { in_flight: inFlight, retried } = picture.cluster;
    const again = retried ? `, ${plural(retried, "retry", "retries")} so far` : "";
    write(by("requests-text"), `${plural(inFlight, "request")} now${again}`);
    if (this.#isTable) this.#fillTable();
  }

  #frame(at) {
    requestAnimationFrame((next) => this.#frame(next));
    const wait = this.#still.matches ? STILL_FRAME_MS : FRAME_MS;
    if (this.#isTable || document.hidden || at - this.#lastFrame < wait) return;
    if (!this.#isStale && !this.#boxes.length) return; // an empty picture does not move
    this.#lastFrame = at;
    this.#isStale = false;
    this.#draw();
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const ratio = devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * ratio) || this.#canvas.height !== Math.round(height * ratio)) {
      this.#canvas.width = Math.round(width * ratio);
      this.#canvas.height = Math.round(height * ratio);
    }
    const pen = this.#canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const now = this.#clock === null ? 0 : this.#clock();
    const from = now - SPAN_S;
    const x = (at) => ((at - from) / SPAN_S) * width;
    this.#drawAxis(pen, width, height);
    const rowHeight = (height - AXIS_PX) / NUM_ROWS;
    const barHeight = Math.max(3, rowHeight - 4);
    const { placed, numHidden } = this.#rows.place(this.#lanes.values(), from, now);
    this.#boxes = [];
    for (const { lane, row } of placed) {
      const y = row * rowHeight + 2;
      const left = Math.max(0, x(lane.spans[0][1]));
      const right = Math.max(left + 2, x(laneEnd(lane, now)));
      this.#boxes.push({ lane, x: left, y: row * rowHeight, width: right - left, height: rowHeight });
      pen.save();
      pen.globalAlpha = lane.end === null ? 1 : 0.62;
      pen.beginPath();
      pen.roundRect(left, y, right - left, barHeight, 4);
      pen.clip();
      // Short stages last and never too thin to see: a hand-over takes milliseconds.
      for (const bar of bars(lane, now).sort((one, other) => ORDER[one.stage] - ORDER[other.stage])) {
        pen.fillStyle = this.colours[bar.stage];
        pen.fillRect(x(bar.from), y, Math.max(THIN_PX, x(bar.to) - x(bar.from)), barHeight);
      }
      pen.restore();
      if (lane.end === "failed" || lane.end === "left") this.#drawEnd(pen, right, y, barHeight, lane.end);
    }
    if (!placed.length) {
      pen.fillStyle = this.colours.muted;
      pen.textAlign = "center";
      pen.font = "13px system-ui, sans-serif";
      pen.fillText("Requests appear here while they run.", width / 2, (height - AXIS_PX) / 2);
      pen.textAlign = "left";
    }
    if (numHidden) {
      pen.fillStyle = this.colours.muted;
      pen.fillText(`and ${numHidden} more`, 6, height - 6);
    }
    this.#showTip();
  }

  #drawAxis(pen, width, height) {
    pen.font = "11px system-ui, sans-serif";
    pen.strokeStyle = this.colours.line;
    pen.fillStyle = this.colours.muted;
    pen.lineWidth = 1;
    for (let back = 5; back < SPAN_S; back += 5) {
      const at = Math.round(width * (1 - back / SPAN_S)) + 0.5;
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, height - AXIS_PX);
      pen.stroke();
      pen.textAlign = "center";
      pen.fillText(`−${back} s`, at, height - 6);
    }
    pen.textAlign = "right";
    pen.fillText("now", width - 2, height - 6);
    pen.textAlign = "left";
  }

  /** A cross where it failed, a stroke where the client left. */
  #drawEnd(pen, right, y, barHeight, end) {
    pen.strokeStyle = end === "failed" ? this.colours.alarm : this.colours.muted;
    pen.lineWidth = 2;
    const half = Math.min(4, barHeight / 2);
    const middle = y + barHeight / 2;
    const at = right + half + 2;
    pen.beginPath();
    pen.moveTo(at - half, middle - half);
    pen.lineTo(end === "failed" ? at + half : at - half, middle + half);
    if (end === "failed") {
      pen.moveTo(at + half, middle - half);
      pen.lineTo(at - half, middle + half);
    }
    pen.stroke();
  }

  #showTip() {
    const tip = by("tip");
    const at = this.#pointer;
    const box = at && this.#boxes.find((one) =>
      at.x >= one.x && at.x <= one.x + one.width && at.y >= one.y && at.y <= one.y + one.height);
    tip.hidden = !box;
    if (!box) return;
    write(tip, describe(box.lane, this.#clock(), duration, shortId));
    const room = this.#canvas.clientWidth - tip.offsetWidth;
    tip.style.setProperty("left", `${Math.max(0, Math.min(at.x + 14, room))}px`);
    tip.style.setProperty("top", `${at.y + 16}px`);
  }

  #toggle() {
    this.#isTable = !this.#isTable;
    by("as-table").setAttribute("aria-pressed", String(this.#isTable));
    by("timeline").hidden = this.#isTable;
    by("requests-table").hidden = !this.#isTable;
    if (this.#isTable) this.#fillTable();
  }

  #fillTable() {
    const now = this.#clock === null ? 0 : this.#clock();
    const lanes = [...this.#lanes.values()]
      .sort((one, other) => other.spans[0][1] - one.spans[0][1])
      .slice(0, TABLE_ROWS);
    const body = by("request-rows");
    while (body.children.length > lanes.length) body.lastChild.remove();
    while (body.children.length < lanes.length) {
      const row = make("tr");
      for (let cell = 0; cell < 10; cell += 1) row.append(make("td"));
      body.append(row);
    }
    lanes.forEach((lane, index) => {
      const seconds = stageSeconds(lane, now);
      const attempt = lane.attempts > 1 ? ` (attempt ${lane.attempts})` : "";
      const texts = [
        shortId(lane.id),
        stateOf(lane) + attempt,
        lane.prefill ?? "–",
        lane.decode ?? "–",
        String(lane.prompt),
        lane.end === null ? "…" : String(lane.tokens),
        ...STAGES.map((stage) => (seconds[stage] ? duration(seconds[stage]) : "–")),
      ];
      texts.forEach((text, column) => write(body.children[index].children[column], text));
    });
  }
}
