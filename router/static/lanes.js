// Requests as bars in time. Pure: what to draw, not how.

export const STAGES = ["queue", "prefill", "transfer", "decode"];

/** When the lane's last stage ended, or `now` while it lasts. */
export function laneEnd(lane, now) {
  return lane.ended_at ?? Math.max(now, lane.spans.at(-1)[1]);
}

/** [{stage, from, to}] in seconds, in order; stages without length are left out. */
export function bars(lane, now) {
  const ends = [...lane.spans.slice(1).map(([, at]) => at), laneEnd(lane, now)];
  return lane.spans
    .map(([stage, from], index) => ({ stage, from, to: ends[index] }))
    .filter(({ from, to }) => to > from);
}

/** Seconds per stage, over all attempts. */
export function stageSeconds(lane, now) {
  const seconds = { queue: 0, prefill: 0, transfer: 0, decode: 0 };
  for (const { stage, from, to } of bars(lane, now)) seconds[stage] += to - from;
  return seconds;
}

/** "decode" … while it runs, else how it ended: "finished", "left", "failed". */
export function stateOf(lane) {
  return lane.end ?? lane.spans.at(-1)[0];
}

/** What a person wants to know of a lane, one fact per line. */
export function describe(lane, now, duration, shortId) {
  const seconds = stageSeconds(lane, now);
  const where = lane.prefill && lane.prefill !== lane.decode ? `${lane.prefill} → ${lane.decode}` : lane.decode;
  return [
    `${shortId(lane.id)}: ${stateOf(lane)}${lane.attempts > 1 ? `, attempt ${lane.attempts}` : ""}`,
    where ? `on ${where}` : "not placed yet",
    `${lane.prompt} prompt tokens${lane.cached ? ` (${lane.cached} cached)` : ""}${lane.end ? `, ${lane.tokens} generated` : ""}`,
    STAGES.filter((stage) => seconds[stage] > 0).map((stage) => `${stage} ${duration(seconds[stage])}`).join(" · "),
  ].filter(Boolean).join("\n");
}

/**
 * Rows of a timeline: each lane keeps the row it was given; a row is free again once its lane's bar has left
 * the picture on the left. Nothing jumps.
 */
export class Rows {
  constructor(numRows) {
    this.numRows = numRows;
    this.rowOf = new Map(); // lane id → row
  }

  /** [{lane, row}] for the lanes that touch `from`…`now`; how many found no row. */
  place(lanes, from, now) {
    const visible = [...lanes].filter((lane) => laneEnd(lane, now) >= from);
    const ids = new Set(visible.map((lane) => lane.id));
    for (const id of this.rowOf.keys()) if (!ids.has(id)) this.rowOf.delete(id);
    const byId = new Map(visible.map((lane) => [lane.id, lane]));
    // A row is taken until its latest lane ended, and a moment more, so that bars do not touch.
    const freeAt = new Array(this.numRows).fill(-Infinity);
    for (const [id, row] of this.rowOf) {
      const lane = byId.get(id);
      freeAt[row] = Math.max(freeAt[row], lane.ended_at === null ? Infinity : lane.ended_at + (now - from) * 0.01);
    }
    let numHidden = 0;
    const newcomers = visible.filter((lane) => !this.rowOf.has(lane.id));
    newcomers.sort((one, other) => one.spans[0][1] - other.spans[0][1]);
    for (const lane of newcomers) {
      const row = freeAt.findIndex((at) => at <= lane.spans[0][1]);
      if (row < 0) {
        numHidden += 1;
        continue;
      }
      this.rowOf.set(lane.id, row);
      freeAt[row] = lane.ended_at === null ? Infinity : lane.ended_at + (now - from) * 0.01;
    }
    const placed = visible.filter((lane) => this.rowOf.has(lane.id));
    return { placed: placed.map((lane) => ({ lane, row: this.rowOf.get(lane.id) })), numHidden };
  }
}
