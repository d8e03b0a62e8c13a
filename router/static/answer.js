// A conversation and the answer that is being written. Pure: events and times in, facts out.

/** The body of a chat request; empty options are left to the server. */
export function requestBody(model, messages, { system = "", temperature = "", maxTokens = "" }) {
  const body = {
    model,
    messages: system.trim() ? [{ role: "system", content: system.trim() }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    max_tokens: maxTokens === "" ? 512 : Number(maxTokens),
  };
  if (temperature !== "") body.temperature = Number(temperature);
  return body;
}

export class ServerError extends Error {}

export class Answer {
  constructor(sentAt) {
    this.text = "";
    this.sentAt = sentAt; // milliseconds, as all times here
    this.firstAt = null;
    this.lastAt = null;
    this.numPieces = 0;
    this.usage = null;
    this.timings = null;
    this.finishReason = null;
    this.isDone = false;
  }

  /** Take the data of one event. Throws `ServerError` with the server's own words. */
  take(data, now) {
    if (data === "[DONE]") {
      this.isDone = true;
      return;
    }
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message);
    this.usage = event.usage ?? this.usage;
    this.timings = event.timings ?? this.timings;
    const choice = event.choices?.[0];
    const piece = choice?.delta?.content;
    if (piece) {
      this.firstAt ??= now;
      this.lastAt = now;
      this.numPieces += 1;
      this.text += piece;
    }
    this.finishReason = choice?.finish_reason ?? this.finishReason;
  }

  /** Whether it reached its longest length, so that more would have come. */
  get isCut() {
    return this.finishReason === "length";
  }

  /** {ttft, tpot, total} in seconds and the token counts, as far as they are known. */
  facts() {
    const numTokens = this.usage?.completion_tokens ?? this.numPieces;
    const seconds = (from, to) => (from === null || to === null ? null : (to - from) / 1000);
    const after = seconds(this.firstAt, this.lastAt);
    const tpot = after !== null && numTokens > 1 ? after / (numTokens - 1) : null;
    return {
      ttft: seconds(this.sentAt, this.firstAt),
      tpot,
      total: seconds(this.sentAt, this.lastAt),
      numTokens,
      perSecond: tpot ? 1 / tpot : null,
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }

  /** [{stage, seconds, worker}] as the server measured them; empty if it did not say. */
  stages() {
    const times = this.timings;
    if (!times) return [];
    const isLocal = times.prefill_worker === times.decode_worker;
    return [
      { stage: "queue", seconds: times.queue_ms / 1000, worker: null },
      { stage: "prefill", seconds: times.prefill_ms / 1000, worker: times.prefill_worker },
      { stage: "transfer", seconds: times.kv_transfer_ms / 1000, worker: null },
      { stage: "decode", seconds: times.decode_ms / 1000, worker: times.decode_worker },
    ].filter(({ stage }) => !(isLocal && stage === "transfer"));
  }
}

/** One sentence for a response that is no stream: the server's own where it has one. */
export function errorText(status, body) {
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `The server answered ${status}.`;
  }
}
