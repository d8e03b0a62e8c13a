"""What the events of an answer mean: which chunks carry content, how it ended, what the server counted.

1. Each event is JSON with `choices`; a chunk has content when any choice has text: `text` (completions),
   `delta.content`, `delta.reasoning_content`, `delta.reasoning` or a part of a tool call (chat). A role
   alone or an empty string is no content.
2. A chunk with content keeps the moment of the read that brought it, and its number of tokens where the
   server says: from `token_ids` of the choices, else from the growth of `usage.completion_tokens` since the
   last such chunk. Tokens of chunks without content (held-back text) count with the next chunk that has
   some.
3. `[DONE]`, an `error` object or the end of the body ends it. It is whole when `[DONE]` came or every
   choice seen gave its `finish_reason`.
"""

from __future__ import annotations

from typing import Any

import orjson

MAX_QUOTED_CHARS = 300


class Answer:
    """One answer as it grows. `moments_ns` are whatever clock the caller stamps reads with."""

    __slots__ = (
        "_counted",
        "_finish_reasons",
        "_seen_choices",
        "_tokens_known",
        "_uncounted_ids",
        "content_parts",
        "error",
        "is_done",
        "keep_text",
        "moments_ns",
        "text_parts",
        "timings",
        "token_counts",
        "usage",
    )

    def __init__(self, keep_text: bool) -> None:
        self.keep_text = keep_text
        self.moments_ns: list[int] = []  # one per chunk with content
        self.token_counts: list[int] = []
        self.usage: dict[str, Any] | None = None
        self.timings: dict[str, Any] | None = None
        self.error: str | None = None
        self.is_done = False  # `[DONE]` came
        self.text_parts: list[str] = []  # content and reasoning
        self.content_parts: list[str] = []  # content alone: what a chat's history holds
        self._seen_choices: set[int] = set()
        self._finish_reasons: dict[int, str] = {}
        self._tokens_known = True
        self._uncounted_ids: int | None = (
            None  # token ids since the last chunk with content; None: none ever came
        )
        self._counted = 0  # usage.completion_tokens at the last chunk with content

    @property
    def is_over(self) -> bool:
        """Nothing that may still come changes the verdict."""
        return self.is_done or self.error is not None

    @property
    def is_whole(self) -> bool:
        finished = bool(self._seen_choices) and len(self._finish_reasons) == len(self._seen_choices)
        return self.error is None and (self.is_done or finished)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice that has one."""
        return self._finish_reasons[min(self._finish_reasons)] if self._finish_reasons else None

    @property
    def chunk_tokens(self) -> list[int]:
        """Per moment; empty unless token ids came, or a usage with every chunk of a single choice."""
        is_one_count = self._uncounted_ids is not None or len(self._seen_choices) == 1
        return self.token_counts if self._tokens_known and is_one_count else []

    def take_event(self, data: bytes, moment_ns: int) -> None:
        """One event of a stream. What is not an OpenAI chunk becomes `error`."""
        if data.startswith(b"[DONE]"):
            self.is_done = True
            return
        try:
            self._take_chunk(orjson.loads(data), moment_ns)
        except orjson.JSONDecodeError as error:
            self.error = f"an event is not JSON ({error}): {quote(data)}"
        except (AttributeError, KeyError, TypeError):
            self.error = f"an event is not a completion chunk: {quote(data)}"

    def take_whole(self, body: bytes, moment_ns: int) -> None:
        """The body of an answer that was not streamed: one chunk."""
        try:
            reply = orjson.loads(body)
            for choice in reply.get("choices") or ():
                if "message" in choice:
                    choice["delta"] = choice["message"]
            self._take_chunk(reply, moment_ns)
        except orjson.JSONDecodeError as error:
            self.error = f"the answer is not JSON ({error}): {quote(body)}"
        except (AttributeError, KeyError, TypeError):
            self.error = f"the answer is not a completion: {quote(body)}"

    def _take_chunk(self, event: dict[str, Any], moment_ns: int) -> None:
        choices = event.get("choices")
        if not choices:
            message = event_error(event)
            if message is not None:
                self.error = message
                return
            choices = ()
        has_content = False
        for choice in choices:
            index = choice.get("index", 0)
            self._seen_choices.add(index)
            delta = choice.get("delta")
            if delta is None:
                text = choice.get("text")
            else:
                text = delta.get("content")
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if thought:
                    has_content = True
                    if self.keep_text:
                        self.text_parts.append(thought)
                elif delta.get("tool_calls"):
                    has_content = True
            if text:
                has_content = True
                if self.keep_text:
                    self.text_parts.append(text)
                    self.content_parts.append(text)
            ids = choice.get("token_ids")
            if ids:
                self._uncounted_ids = (self._uncounted_ids or 0) + len(ids)
            reason = choice.get("finish_reason")
            if reason is not None:
                self._finish_reasons[index] = reason
        usage = event.get("usage")
        if usage:
            self.usage = usage
        if has_content:
            self.moments_ns.append(moment_ns)
            self._count_tokens(usage)
        timings = event.get("timings")
        if timings:
            self.timings = timings

    def _count_tokens(self, usage: dict[str, Any] | None) -> None:
        if self._uncounted_ids is not None:
            self.token_counts.append(self._uncounted_ids)
            self._uncounted_ids = 0
        elif usage:
            count = usage["completion_tokens"]
            self.token_counts.append(count - self._counted)
            self._counted = count
        else:
            self._tokens_known = False


def event_error(event: dict[str, Any]) -> str | None:
    """The message of an error object: `{"error": {"message"}}`, `{"error": "…"}`, `{"object": "error",
    "message"}` or FastAPI's `{"detail"}`."""
    error = event.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if event.get("object") == "error":
        return str(event.get("message") or event)
    if "detail" in event and "choices" not in event:
        return str(event["detail"])
    return None


def body_error(body: bytes) -> str:
    """What the body of a refusal says, in one line; plain text and HTML are quoted."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return quote(body) if body else "no reason given"
    message = event_error(reply) or reply.get("message") if isinstance(reply, dict) else None
    return " ".join(str(message).split()) if message else quote(body)


def quote(data: bytes) -> str:
    text = " ".join(data.decode(errors="replace").split())
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"
