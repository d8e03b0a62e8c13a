"""What a mock answer says and when: a call becomes a list of timed pieces of the body. No IO, no clock.

1. Heartbeats while the first token is awaited; for a chat, a chunk with the role alone.
2. Chunks of content, each at its moment, until the script's fault or the last token.
3. In good order: the finish reason, the usage, `[DONE]`, the end of the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import orjson

from bench.load.mock.script import Call, ErrorShape, Script

WORD = " mock"


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
