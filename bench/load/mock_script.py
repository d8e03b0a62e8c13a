"""What a mock answer says and when: a script becomes a list of timed pieces of the body. No IO, no clock.

A script comes from the `mock` field of a request's body, over the server's default. Prompts are counted by
a rule that a test can state: a list of ids has its length, a text has as many tokens as words (whatever
whitespace parts). Every generated token is the word `" mock"`, so a text's words are its tokens there, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import orjson

from cluster.errors import ConfigError, InvalidRequest

WORD = " mock"
DEFAULT_MAX_TOKENS = 16


class ErrorShape(Enum):
    NESTED = "nested"  # {"error": {"message", …}}
    FLAT = "flat"  # {"object": "error", "message", …}
    TEXT = "text"  # plain text
    EMPTY = "empty"


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. Counts of `*_after` are tokens sent before it happens."""

    ttft_s: float = 0.0  # from the moment the request is admitted to the first chunk with content
    itl_s: float | list[float] = 0.0  # between chunks; a list is used from its start again when it ends
    num_tokens: int | None = None  # None: the request's max_tokens
    tokens_per_chunk: int = 1
    role_chunk: bool = True  # chat: a chunk with the role alone, `role_s` after admission
    role_s: float = 0.0
    usage: bool = True  # False: none, though asked for
    usage_error: int = 0  # added to the true completion_tokens
    continuous_usage: bool = False  # also when not asked for
    token_ids: bool = False
    cached_tokens: int | None = None
    finish_reason: str | None = "length"
    done_mark: bool = True  # the `[DONE]` at the end
    timings: dict[str, float | int | str] | None = None
    error_after: int | None = None  # an error event, then `[DONE]`
    cut_after: int | None = None  # the connection is closed in the middle of the body
    reset_after: int | None = None  # the connection is reset
    end_after: int | None = None  # the body ends in good order, without finish_reason and [DONE]
    stall_after: int | None = None  # nothing more comes
    http_status: int = 200
    error_shape: ErrorShape = ErrorShape.NESTED
    message: str = "as scripted"
    heartbeat_s: float | None = None  # comments while the first token is awaited
    split_bytes: int | None = None  # the body is written in slices of this size
    line_end: str = "\n"
    space_after_colon: bool = True
    framing: str = "chunked"  # "chunked", "close"
    keep_alive: bool = True
    label: str = ""  # comes back in the truth


class Act(Enum):
    WRITE = "write"
    END = "end"  # in good order
    CUT = "cut"
    RESET = "reset"
    STALL = "stall"


class Step(NamedTuple):
    """One thing the server does, `due_s` after it admitted the request."""

    due_s: float
    act: Act
    data: bytes = b""
    num_tokens: int = 0  # in `data`; 0: no content


class Call(NamedTuple):
    """A request, as far as the mock looks at it."""

    is_chat: bool
    is_stream: bool
    wants_usage: bool
    wants_continuous_usage: bool
    prompt_tokens: int
    max_tokens: int
    script: Script


def read_call(body: dict[str, Any], is_chat: bool, default: Script) -> Call:
    """
    Raises:
        InvalidRequest: the body lacks its prompt, or its script has an unknown or wrong field.
    """
    field = body.get("mock", {})
    try:
        script = msgspec.convert(msgspec.to_builtins(default) | field, Script)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"the mock's script cannot be read: {error}", param="mock") from None
    prompt = body.get("messages" if is_chat else "prompt")
    if not prompt:
        raise InvalidRequest("no prompt", param="messages" if is_chat else "prompt")
    options = body.get("stream_options") or {}
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    return Call(
        is_chat=is_chat,
        is_stream=bool(body.get("stream")),
        wants_usage=bool(options.get("include_usage")),
        wants_continuous_usage=bool(options.get("continuous_usage_stats")),
        prompt_tokens=count_tokens(prompt),
        max_tokens=max_tokens,
        script=script,
    )


def count_tokens(prompt: object) -> int:
    """Words of a text, length of a list of ids, words of all messages' contents."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, list):
        if all(isinstance(item, int) for item in prompt):
            return len(prompt)
        return sum(count_tokens(item.get("content") if isinstance(item, dict) else item) for item in prompt)
    return 0


def read_script(text: str) -> Script:
    """A script written as JSON.

    Raises:
        ConfigError: not JSON, or an unknown or wrong field.
    """
    try:
        return msgspec.json.decode(text.encode(), type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the script `{text}` cannot be read: {error}") from None


def answer_steps(call: Call, request_id: str, model: str) -> list[Step]:
    """The stream of a call, piece by piece, until it ends one way or another."""
    return list(_Writer(call, request_id, model).steps())


def error_body(script: Script) -> tuple[bytes, bytes]:
    """(content type, body) of a refusal."""
    message = script.message
    if script.error_shape is ErrorShape.NESTED:
        error = {"message": message, "type": "mock_error", "param": None, "code": None}
        return b"application/json", orjson.dumps({"error": error})
    if script.error_shape is ErrorShape.FLAT:
        return b"application/json", orjson.dumps(
            {"object": "error", "message": message, "code": script.http_status}
        )
    return b"text/plain", message.encode() if script.error_shape is ErrorShape.TEXT else b""


def whole_answer(call: Call, request_id: str, model: str) -> bytes:
    """The body of a call that does not stream."""
    num_tokens = _num_tokens(call)
    text = WORD * num_tokens
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if call.is_chat else {"text": text}
    )
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": call.script.finish_reason}
    reply = {
        "id": request_id,
        "object": "chat.completion" if call.is_chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage_of(call, num_tokens),
    }
    return orjson.dumps(reply)


def end_s(call: Call) -> float:
    """When the last token is due, since admission."""
    script = call.script
    num_chunks = -(-_num_tokens(call) // script.tokens_per_chunk)
    return script.ttft_s + sum(_gap(script, position) for position in range(max(0, num_chunks - 1)))


def usage_of(call: Call, num_tokens: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": num_tokens + call.script.usage_error,
        "total_tokens": call.prompt_tokens + num_tokens,
    }
    if call.script.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": call.script.cached_tokens}
    return usage


def _num_tokens(call: Call) -> int:
    return call.max_tokens if call.script.num_tokens is None else call.script.num_tokens


def _gap(script: Script, position: int) -> float:
    """Between chunks `position` and `position + 1`."""
    gaps = script.itl_s
    return gaps[position % len(gaps)] if isinstance(gaps, list) else gaps


class _Writer:
    """Writes one stream; what all its chunks share is encoded once."""

    def __init__(self, call: Call, request_id: str, model: str) -> None:
        self._call = call
        script = call.script
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        frame = {"id": request_id, "object": kind, "created": 0, "model": model, "system_fingerprint": None}
        self._frame = orjson.dumps(frame)[:-1]
        self._colon = b"data: " if script.space_after_colon else b"data:"
        self._end = script.line_end.encode() * 2
        self._continuous = script.continuous_usage or call.wants_continuous_usage
        self._plain: dict[int, bytes] = {}  # tokens in a chunk |-> its event, when all such events are equal

    def steps(self) -> Iterator[Step]:
        call, script = self._call, self._call.script
        if script.heartbeat_s is not None:
            beat = 1
            while beat * script.heartbeat_s < script.ttft_s:
                yield Step(beat * script.heartbeat_s, Act.WRITE, b": ping" + self._end)
                beat += 1
        if call.is_chat and script.role_chunk:
            yield Step(
                script.role_s,
                Act.WRITE,
                self._choice({"delta": {"role": "assistant", "content": ""}}, None, 0),
            )
        total = _num_tokens(call)
        due_s = script.ttft_s
        num_sent = 0
        position = 0
        while num_sent < total:
            if fault := self._fault(num_sent):
                yield from self._failing(fault, due_s)
                return
            num_tokens = min(script.tokens_per_chunk, total - num_sent)
            num_sent += num_tokens
            yield Step(due_s, Act.WRITE, self._content(num_tokens, num_sent), num_tokens)
            if num_sent < total:
                due_s += _gap(script, position)
                position += 1
        if fault := self._fault(num_sent):
            yield from self._failing(fault, due_s)
            return
        if script.finish_reason is not None:
            last: dict[str, Any] = {"delta": {}} if call.is_chat else {"text": ""}
            yield Step(due_s, Act.WRITE, self._choice(last, script.finish_reason, num_sent))
        if script.usage and call.wants_usage:
            fields: dict[str, Any] = {"choices": [], "usage": usage_of(call, num_sent)}
            if script.timings is not None:
                fields["timings"] = script.timings
            yield Step(due_s, Act.WRITE, self._event(fields))
        if script.done_mark:
            yield Step(due_s, Act.WRITE, self._raw(b"[DONE]"))
        yield Step(due_s, Act.END)

    def _fault(self, num_sent: int) -> str | None:
        """The script's fault that is due after `num_sent` tokens."""
        script = self._call.script
        faults = {
            "error": script.error_after,
            "cut": script.cut_after,
            "reset": script.reset_after,
            "end": script.end_after,
            "stall": script.stall_after,
        }
        return next((name for name, after in faults.items() if after is not None and num_sent >= after), None)

    def _failing(self, fault: str, due_s: float) -> Iterator[Step]:
        if fault == "error":
            error = {"message": self._call.script.message, "type": "mock_error", "param": None, "code": None}
            yield Step(due_s, Act.WRITE, self._raw(orjson.dumps({"error": error})))
            yield Step(due_s, Act.WRITE, self._raw(b"[DONE]"))
            yield Step(due_s, Act.END)
        else:
            yield Step(due_s, Act(fault))

    def _content(self, num_tokens: int, num_sent: int) -> bytes:
        is_plain = not self._continuous and not self._call.script.token_ids
        event = self._plain.get(num_tokens) if is_plain else None
        if event is None:
            text = WORD * num_tokens
            fields: dict[str, Any] = {"delta": {"content": text}} if self._call.is_chat else {"text": text}
            if self._call.script.token_ids:
                fields["token_ids"] = list(range(num_sent - num_tokens, num_sent))
            event = self._choice(fields, None, num_sent)
            if is_plain:
                self._plain[num_tokens] = event
        return event

    def _choice(self, fields: dict[str, Any], finish_reason: str | None, num_sent: int) -> bytes:
        event: dict[str, Any] = {
            "choices": [{"index": 0, **fields, "logprobs": None, "finish_reason": finish_reason}]
        }
        if self._continuous:
            event["usage"] = usage_of(self._call, num_sent)
        return self._event(event)

    def _event(self, fields: dict[str, Any]) -> bytes:
        return self._raw(b"%b,%b" % (self._frame, orjson.dumps(fields)[1:]))

    def _raw(self, data: bytes) -> bytes:
        return self._colon + data + self._end
