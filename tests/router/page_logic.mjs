// The page's pure modules. Run by test_page_logic.py, with the modules beside this file.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer, errorText, requestBody, ServerError } from "./answer.js";
import { axisTop, levelPath, linePath } from "./charts.js";
import { count, duration, percent, plural, rate, shortId } from "./format.js";
import { bars, describe, laneEnd, Rows, stageSeconds, stateOf } from "./lanes.js";
import { blocks, inlines } from "./markdown.js";
import { applyPart, emptyPicture, restarted } from "./picture.js";
import { SseParser } from "./sse.js";

const lane = (id, spans, more = {}) => ({
  id, spans, prompt: 9, cached: 0, tokens: 0, attempts: 1, prefill: "prefill-0", decode: "decode-0",
  kv_bytes: 0, end: null, ended_at: null, ...more,
});

/** Numbers that are the same in every run. */
function generator(seed) {
  return () => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return seed / 2 ** 32;
  };
}

test("numbers", () => {
  assert.deepEqual([0.0042, 0.0842, 0.9996, 1.2349, 12.34, 300, null].map(duration),
    ["4.2 ms", "84 ms", "1.00 s", "1.23 s", "12.3 s", "300 s", "–"]);
  assert.deepEqual([0, 950, 12345, 4.2e6].map(count), ["0", "950", "12.3k", "4.2M"]);
  assert.deepEqual([1, 0.9999, 0.984, 0.5, 0.003, 0, null].map(percent),
    ["100 %", "99.9 %", "98 %", "50 %", "0.3 %", "0.0 %", "–"]);
  assert.deepEqual([0.05, 9.96, 41.7].map(rate), ["0.1", "10", "42"]);
  assert.equal(shortId("chatcmpl-0123456789abcdef"), "012345");
  assert.deepEqual([plural(1, "token"), plural(2, "retry", "retries")], ["1 token", "2 retries"]);
});

test("events come whole however the bytes are cut", () => {
  const text = ': ping\n\ndata: {"a":1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n';
  const whole = new SseParser().push(text);
  assert.deepEqual(whole, ['{"a":1}', "two\nlines", "[DONE]"]);
  for (let size = 1; size < text.length; size += 1) {
    const parser = new SseParser();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...parser.push(text.slice(at, at + size)));
    assert.deepEqual(found, whole, `pieces of ${size}`);
  }
});

test("an answer adds up", () => {
  const answer = new Answer(1000);
  const chunk = (delta, finish = null) => JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] });
  answer.take(chunk({ role: "assistant", content: "" }), 1050);
  assert.equal(answer.facts().ttft, null);
  answer.take(chunk({ content: "Hel" }), 1100);
  answer.take(chunk({ content: "lo" }), 1300);
  answer.take(chunk({}, "stop"), 1300);
  answer.take(JSON.stringify({
    choices: [],
    usage: { prompt_tokens: 9, completion_tokens: 3, prompt_tokens_details: { cached_tokens: 4 } },
    timings: { queue_ms: 2, prefill_ms: 90, kv_transfer_ms: 3, decode_ms: 200, prefill_worker: "p", decode_worker: "d" },
  }), 1301);
  answer.take("[DONE]", 1301);
  assert.equal(answer.text, "Hello");
  assert.equal(answer.finishReason, "stop");
  assert.deepEqual(answer.facts(),
    { ttft: 0.1, tpot: 0.1, total: 0.3, numTokens: 3, perSecond: 10, promptTokens: 9, cachedTokens: 4 });
  assert.deepEqual(answer.stages().map((part) => part.stage), ["queue", "prefill", "transfer", "decode"]);
  answer.timings = { ...answer.timings, prefill_worker: "d" };
  assert.deepEqual(answer.stages().map((part) => part.stage), ["queue", "prefill", "decode"]);
  assert.ok(answer.isDone);
  assert.ok(!answer.isCut);
  answer.take(chunk({}, "length"), 1302);
  assert.ok(answer.isCut);
});

test("an error event is the server's own sentence", () => {
  const answer = new Answer(0);
  assert.throws(() => answer.take('{"error":{"message":"Worker lost."}}', 1), (error) =>
    error instanceof ServerError && error.message === "Worker lost.");
  assert.equal(errorText(429, '{"error":{"message":"Too many."}}'), "Too many.");
  assert.equal(errorText(502, "<html>"), "The server answered 502.");
});

test("a request says what was set and no more", () => {
  const messages = [{ role: "user", content: "Hi" }];
  const plain = requestBody("m", messages, {});
  assert.equal(plain.temperature, undefined);
  assert.deepEqual(plain.messages, messages);
  const full = requestBody("m", messages, { system: " Be brief. ", temperature: "0", maxTokens: "7" });
  assert.deepEqual(full.messages[0], { role: "system", content: "Be brief." });
  assert.equal(full.temperature, 0);
  assert.equal(full.max_tokens, 7);
});

test("Markdown is a tree, and what is not Markdown stays text", () => {
  const found = blocks("# Title\nOne\ntwo\n\nThree\n- a\n- b\n1. x\n2) y\n```py\nif a < b:\n    **no**\n```\nend");
  assert.deepEqual(found.map((block) => block.kind), ["h", "p", "p", "ul", "ol", "pre", "p"]);
  assert.equal(found[1].text, "One\ntwo");
  assert.deepEqual(found[3].items, ["a", "b"]);
  assert.equal(found[5].text, "if a < b:\n    **no**");
  assert.deepEqual(blocks("```\nopen").map((block) => [block.kind, block.text]), [["pre", "open"]]);
  assert.deepEqual(inlines("a `b<c>` **d** e*f"),
    [{ kind: "text", text: "a " }, { kind: "code", text: "b<c>" }, { kind: "text", text: " " },
      { kind: "strong", text: "d" }, { kind: "text", text: " e*f" }]);
  const odd = "<script>alert(1)</script> **open `tick";
  assert.equal(inlines(odd).map((part) => part.text).join(""), odd);
});

test("a picture takes parts, and keeps a bounded number of ended lanes", () => {
  let picture = emptyPicture();
  picture = applyPart(picture, { now: 1, workers: [{ id: "d" }], lanes: [lane("a", [["queue", 0.5]])] });
  assert.equal(picture.lanes.get("a").end, null);
  picture = applyPart(picture, { now: 2, lanes: [lane("a", [["queue", 0.5]], { end: "finished", ended_at: 2 })] });
  assert.equal(picture.lanes.size, 1);
  assert.deepEqual(picture.workers, [{ id: "d" }]);
  picture = applyPart(picture, { now: 2, lanes: [lane("live", [["queue", 1]])] });
  for (let number = 0; number < 500; number += 1) {
    picture = applyPart(picture, { now: 3, lanes: [lane(`r${number}`, [["queue", 1]], { end: "left", ended_at: 3 + number })] });
  }
  assert.equal(picture.lanes.size, 121);
  assert.ok(picture.lanes.has("live") && picture.lanes.has("r499") && !picture.lanes.has("a"));
  assert.equal(restarted(picture).lanes.size, 0);
});

test("bars cover a lane without gaps", () => {
  const one = lane("a", [["queue", 1], ["prefill", 2], ["transfer", 2.5], ["decode", 2.5]]);
  assert.deepEqual(bars(one, 4), [
    { stage: "queue", from: 1, to: 2 }, { stage: "prefill", from: 2, to: 2.5 }, { stage: "decode", from: 2.5, to: 4 }]);
  assert.deepEqual(stageSeconds(one, 4), { queue: 1, prefill: 0.5, transfer: 0, decode: 1.5 });
  assert.equal(stateOf(one), "decode");
  assert.equal(laneEnd({ ...one, end: "failed", ended_at: 3 }, 9), 3);
  assert.match(describe(one, 4, duration, shortId), /a: decode\non prefill-0 → decode-0\n9 prompt tokens\nqueue 1.00 s/);
});

test("lanes keep their row, and never share one at the same time", () => {
  const random = generator(7);
  const rows = new Rows(6);
  const lanes = new Map();
  const given = new Map();
  let number = 0;
  for (let now = 0; now < 200; now += 0.5) {
    if (random() < 0.6) lanes.set(`r${number}`, lane(`r${(number += 1) - 1}`, [["queue", now]]));
    for (const one of lanes.values()) {
      if (one.end === null && random() < 0.15) Object.assign(one, { end: "finished", ended_at: now });
    }
    const { placed, numHidden } = rows.place(lanes.values(), now - 30, now);
    const visible = [...lanes.values()].filter((one) => laneEnd(one, now) >= now - 30);
    assert.equal(placed.length + numHidden, visible.length);
    for (const { lane: one, row } of placed) {
      assert.ok(row >= 0 && row < 6);
      assert.equal(given.get(one.id) ?? row, row, "a lane changed its row");
      given.set(one.id, row);
      for (const { lane: other, row: otherRow } of placed) {
        if (one === other || row !== otherRow) continue;
        const apart = laneEnd(one, now) <= other.spans[0][1] || laneEnd(other, now) <= one.spans[0][1];
        assert.ok(apart, `${one.id} and ${other.id} share row ${row}`);
      }
    }
  }
  assert.ok(number > 50);
});

test("curves", () => {
  assert.equal(linePath([0, 1, null, 1], 30, 10, 1), "M0.0 10.0L10.0 0.0M30.0 0.0h5.0");
  assert.equal(linePath([null, null], 30, 10, 1), "");
  assert.equal(linePath([5], 30, 10, 1), "M0.0 0.0h15.0");
  assert.equal(levelPath(0.5, 30, 10, 1), "M0 5.0H30");
  assert.equal(levelPath(2, 30, 10, 1), "");
  assert.ok(axisTop([0.1, null, 0.2], 0.3) >= 0.3);
  assert.ok(axisTop([0.01], 2) < 2, "a far target does not flatten the curve");
  assert.ok(axisTop([], 2) > 0);
});
