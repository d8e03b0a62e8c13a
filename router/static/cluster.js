// The cluster's figures and workers: writes what changed of a picture into the document.

import { axisTop, levelPath, linePath } from "./charts.js";
import { make, write } from "./dom.js";
import { count, duration, percent, plural, rate } from "./format.js";

const by = (id) => document.getElementById(id);
const MAX_CELLS = 64;
const CHART = { width: 120, height: 28 };
const STATES = {
  ready: "ready",
  connecting: "connecting",
  waiting_for_workers: "waiting for workers",
  loading_model: "loading the model",
  warming_up: "warming up",
  draining: "stopping",
  stopping: "stopping",
  lost: "no connection",
};

export function showState(state) {
  by("state").dataset.state = state;
  write(by("state-text"), STATES[state] ?? state.replaceAll("_", " "));
}

export function showFigures(picture) {
  const { about, cluster, window } = picture;
  showState(cluster.state);
  write(by("model"), about ? about.model : "");
  const live = `${count(cluster.in_flight)} in flight, ${count(cluster.queued)} queued`;
  const flow = window ? `${rate(window.requests_per_s)} requests/s · ${rate(window.tokens_per_s)} tokens/s` : "";
  write(by("flow"), [live, flow].filter(Boolean).join(" · "));
  if (!window || !about) return;
  write(by("attainment"), percent(window.attainment));
  const failed = window.failed ? `, ${count(window.failed)} failed` : "";
  write(by("window-text"), `last ${duration(window.seconds)}: ${count(window.finished)} finished${failed}`);
  const points = picture.series.points;
  const attained = points.map((point) => point[1]);
  by("trend").querySelector(".line").setAttribute("d", linePath(attained, CHART.width, CHART.height, 1));
  showLatency("ttft", window.ttft_s, about.slo.ttft_s, points.map((point) => point[3]));
  showLatency("tpot", window.tpot_s, about.slo.tpot_s, points.map((point) => point[4]));
}

function showLatency(name, percentiles, target, series) {
  const row = by(name);
  for (const [key, value] of Object.entries(percentiles)) {
    const cell = row.querySelector(`[data-p="${key}"]`);
    write(cell, duration(value));
    cell.classList.toggle("over", value !== null && value > target);
  }
  write(row.querySelector('[data-p="target"]'), duration(target));
  const top = axisTop(series, target);
  row.querySelector(".line").setAttribute("d", linePath(series, CHART.width, CHART.height, top));
  row.querySelector(".target").setAttribute("d", levelPath(target, CHART.width, CHART.height, top));
}

export class Workers {
  #cards = new Map(); // worker id → its parts

  show(workers) {
    const ids = new Set(workers.map((worker) => worker.id));
    for (const [id, card] of this.#cards) {
      if (!ids.has(id)) {
        card.element.remove();
        this.#cards.delete(id);
      }
    }
    const ordered = [...workers].sort((one, other) =>
      one.role === other.role ? one.id.localeCompare(other.id, "en", { numeric: true }) : one.role === "prefill" ? -1 : 1);
    for (const worker of ordered) {
      if (!this.#cards.has(worker.id)) {
        const card = newCard(worker);
        this.#cards.set(worker.id, card);
      }
      const card = this.#cards.get(worker.id);
      fillCard(card, worker);
      if (by("workers").children[ordered.indexOf(worker)] !== card.element) {
        by("workers").insertBefore(card.element, by("workers").children[ordered.indexOf(worker)] ?? null);
      }
    }
    const empty = by("workers").querySelector(".empty");
    if (!workers.length && !empty) by("workers").append(make("li", "empty", "None is here yet."));
    if (workers.length && empty) empty.remove();
  }
}

function newCard(worker) {
  const element = make("li", `worker ${worker.role}`);
  const title = make("h4");
  const name = make("span");
  const state = make("span", "state");
  state.append(make("span", "dot"), make("span"));
  title.append(name, state);
  const list = make("dl");
  const fact = (label) => {
    const value = make("dd");
    list.append(make("dt", "", label), value);
    return value;
  };
  const graphic = (className) => {
    const holder = make("dd", "graphic");
    const inner = make("div", className);
    inner.setAttribute("aria-hidden", "true");
    holder.append(inner);
    list.append(holder);
    return inner;
  };
  const card = { element, name, state, batch: fact("batch"), cells: graphic("cells"), queue: fact("queue"), kv: fact("KV blocks"), share: graphic("share"), speed: fact("speed") };
  card.share.append(make("i", "used"), make("i", "cached"));
  element.append(title, list);
  return card;
}

function fillCard(card, worker) {
  card.element.className = `worker ${worker.role}`; // it may change
  write(card.name, worker.id.startsWith(worker.role) ? worker.id : `${worker.id} ${worker.role}`);
  card.state.dataset.state = worker.state;
  write(card.state.lastChild, worker.state);
  const { used, cached, free } = worker.kv;
  const total = used + cached + free;
  write(card.batch, `${worker.running} of ${worker.max_num_seqs || "?"}`);
  write(card.queue, worker.queued_prefill_tokens
    ? `${plural(worker.waiting, "request")}, ${count(worker.queued_prefill_tokens)} tokens`
    : plural(worker.waiting, "request"));
  write(card.kv, `${count(used)} of ${count(total)}${cached ? `, ${count(cached)} cached` : ""}`);
  const [usedPart, cachedPart] = card.share.children;
  usedPart.style.setProperty("flex-basis", `${total ? (used / total) * 100 : 0}%`);
  cachedPart.style.setProperty("flex-basis", `${total ? (cached / total) * 100 : 0}%`);
  write(card.speed, speed(worker));
  fillCells(card.cells, worker);
}

function speed(worker) {
  if (worker.role === "decode" && worker.step_ms) return `${duration(worker.step_ms / 1000)} per step`;
  if (worker.prefill_tokens_per_s) return `${count(worker.prefill_tokens_per_s)} tokens/s`;
  return "not measured yet";
}

/** One cell per place in the batch, or per share of it where there are many. */
function fillCells(cells, worker) {
  const places = worker.max_num_seqs || worker.running;
  const perCell = Math.max(1, Math.ceil(places / MAX_CELLS));
  const numCells = Math.ceil(places / perCell);
  while (cells.children.length > numCells) cells.lastChild.remove();
  while (cells.children.length < numCells) cells.append(make("i"));
  const numOn = Math.ceil(worker.running / perCell);
  const numWaiting = Math.ceil(worker.waiting / perCell);
  [...cells.children].forEach((cell, index) => {
    const kind = index < numOn ? "on" : index < numOn + numWaiting ? "wait" : "";
    if (cell.className !== kind) cell.className = kind;
  });
}
