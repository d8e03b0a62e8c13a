"""What the events of an answer mean: which chunks carry content, how it ended, what the server counted.

1. Each event is JSON with `choices`; a chunk has content when any choice has text: `text` (completions),
   `delta.content`, `delta.reasoning_content`, `delta.reasoning`, `delta.refusal`, or a part of a tool or
   function call (chat). A role alone or an empty string is no content.
2. A chunk with content keeps the moment of the read that brought it, and its number of tokens where the
   server says: from `token_ids` of the choices, else from the growth of `usage.completion_tokens` since the
   last such chunk. Tokens of chunks without content (held-back text) count with the next chunk that has
   some.
3. `[DONE]`, an error or the end of the body ends it. An error is an `error` object (beside choices, too), an
   event of that name, or `finish_reason` `error` or `abort`. It is whole when `[DONE]` came or every choice
   seen gave its `finish_reason`.

Every field that is used is checked here, once: what leaves an `Answer` has the types that a record declares.
A field of another type makes the answer an error that names it.
"""

from __future__ import annotations

from typing import Any

from bench.load.client.replies import body_error, checked, event_error, quote, read_count, read_json
from cluster.errors import ProtocolError

FAILED_REASONS = frozenset({"error", "abort"})
OTHER_TEXTS = ("reasoning_content", "reasoning", "refusal")  # generated, but no part of a chat's history
CALLS = ("tool_calls", "function_call")


class Answer:
    """One answer as it grows. `moments_ns` are whatever clock the caller stamps reads with."""

    __slots__ = (
        "_counted",
        "_finish_reasons",
        "_seen_choices",
        "_tokens_known",
        "_uncounted_ids",
        "cached_tokens",
        "content_parts",
        "error",
        "input_tokens",
        "is_done",
        "keep_text",
        "moments_ns",
        "output_tokens",
        "text_parts",
        "timings",
        "token_counts",
    )

    def __init__(self, keep_text: bool) -> None:
        self.keep_text = keep_text
        self.moments_ns: list[int] = []  # one per chunk with content
        self.token_counts: list[int] = []
        self.input_tokens: int | None = None  # by the server's usage, the last that told it
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.timings: dict[str, Any] = {}
        self.error: str | None = None
        self.is_done = False  # `[DONE]` came
        self.text_parts: list[str] = []  # all that was generated
        self.content_parts: list[str] = []  # content alone: what a chat's history holds
        self._seen_choices: set[int] = set()
        self._finish_reasons: dict[int, str] = {}
        self._tokens_known = True
        # Token ids since the last chunk with content; None: none ever came.
        self._uncounted_ids: int | None = None
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

    def take_event(self, data: bytes, moment_ns: int, is_error: bool = False) -> None:
        """One event of a stream; `is_error`: its name says so. What is not an OpenAI chunk becomes
        `error`."""
        data = data.strip()
        if is_error:
            self.error = body_error(data)
        elif data.startswith(b"[DONE]"):
            self.is_done = True
        elif data:
            self._take(data, moment_ns, "an event", "completion chunk")

    def take_whole(self, body: bytes, moment_ns: int) -> None:
        """The body of an answer that was not streamed: one chunk."""
        self._take(body, moment_ns, "the answer", "completion")

    def _take(self, data: bytes, moment_ns: int, what: str, kind: str) -> None:
        try:
            event = read_json(data)
        except ProtocolError as error:
            self.error = f"{what} is {error}: {quote(data)}"
            return
        try:
            if not isinstance(event, dict):
                raise ProtocolError("it is no object")
            self._take_chunk(event, moment_ns)
        except ProtocolError as error:
            self.error = f"{what} is not a {kind}, {error}: {quote(data)}"

    def _take_chunk(self, event: dict[str, Any], moment_ns: int) -> None:
        choices = event.get("choices")
        if not choices or event.get("error"):
            self.error = event_error(event)
            if self.error is not None:
                return
        has_content = False
        for choice in checked(choices or [], list, "choices"):
            if self._take_choice(checked(choice, dict, "choices[]")):
                has_content = True
        usage = event.get("usage")
        count = None if usage is None else self._take_usage(checked(usage, dict, "usage"))
        if has_content:
            self.moments_ns.append(moment_ns)
            self._count_tokens(count)
        timings = event.get("timings")
        if timings is not None:
            self.timings = checked(timings, dict, "timings")

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Whether it has content."""
        index = checked(choice.get("index", 0), int, "index")
        self._seen_choices.add(index)
        delta = choice.get("delta") or choice.get("message")
        has_content = False
        if not delta:
            text = choice.get("text")
        else:
            delta = checked(delta, dict, "delta")
            text = delta.get("content")
            for name in OTHER_TEXTS:
                other = delta.get(name)
                if other:
                    has_content = True
                    self._keep(self.text_parts, checked(other, str, name))
                    break  # a server may tell the same under two names
            else:
                has_content = any(delta.get(name) for name in CALLS)
        if text:
            has_content = True
            self._keep(self.text_parts, checked(text, str, "content" if delta else "text"))
            self._keep(self.content_parts, text)
        ids = choice.get("token_ids")
        if ids:
            self._uncounted_ids = (self._uncounted_ids or 0) + len(checked(ids, list, "token_ids"))
        reason = choice.get("finish_reason")
        if reason is not None:
            self._finish_reasons[index] = checked(reason, str, "finish_reason")
            if reason in FAILED_REASONS:
                self.error = event_error(choice) or f"the server ended it with finish_reason `{reason}`"
        return has_content

    def _keep(self, parts: list[str], text: str) -> None:
        if self.keep_text:
            parts.append(text)

    def _take_usage(self, usage: dict[str, Any]) -> int | None:
        """Output tokens so far, if it tells them. What it leaves out stays as it was told before."""
        input_tokens = read_count(usage, "prompt_tokens")
        if input_tokens is not None:
            self.input_tokens = input_tokens
        output_tokens = read_count(usage, "completion_tokens")
        if output_tokens is not None:
            self.output_tokens = output_tokens
        details = usage.get("prompt_tokens_details")
        if details is not None:
            cached_tokens = read_count(checked(details, dict, "prompt_tokens_details"), "cached_tokens")
            self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens
        return output_tokens

    def _count_tokens(self, count: int | None) -> None:
        if self._uncounted_ids is not None:
            self.token_counts.append(self._uncounted_ids)
            self._uncounted_ids = 0
        elif count is not None and count >= self._counted:
            self.token_counts.append(count - self._counted)
            self._counted = count
        else:
            self._tokens_known = False
