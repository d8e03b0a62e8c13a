// The viewer's copy of the cluster: sections replaced as they come, lanes merged by id. Pure.

export const FORMAT = 1;
const KEPT_ENDED = 120;

export function emptyPicture() {
  return {
    now: 0,
    about: null,
    cluster: { state: "connecting", queued: 0, in_flight: 0, without_lane: 0, arrived: 0, retried: 0 },
    workers: [],
    window: null,
    series: { slice_s: 5, points: [] },
    lanes: new Map(),
  };
}

/** The picture after an event of the stream; lanes of `picture` are taken over and changed. */
export function applyPart(picture, part) {
  const { lanes: changed = [], ...sections } = part;
  const lanes = picture.lanes;
  for (const lane of changed) lanes.set(lane.id, lane);
  const ended = [...lanes.values()].filter((lane) => lane.end !== null);
  if (ended.length > KEPT_ENDED) {
    ended.sort((one, other) => one.ended_at - other.ended_at);
    for (const lane of ended.slice(0, ended.length - KEPT_ENDED)) lanes.delete(lane.id);
  }
  return { ...picture, ...sections, lanes };
}

/** A new stream begins: what is live is told again, so what an old one left open is forgotten. */
export function restarted(picture) {
  return { ...picture, lanes: new Map() };
}
