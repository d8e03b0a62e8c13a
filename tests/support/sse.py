"""Reading and checking server-sent event streams of completions: "SSE-OK" as code, for every test that
streams.

`parse_events` reads the grammar strictly; `check_stream` holds one reply's chunks to the order that clients
rely on and returns what they add up to, so that a test can compare it with the reply that was not streamed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "chat.completion.chunk", "text_completion"
FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"not JSON: {name}")

    return json.loads(text, parse_constant=refuse)


def parse_events(raw: bytes) -> tuple[list[Any], int]:
    """(data of every event but the last, number of pings); the stream must end with one `data: [DONE]`."""
    text = raw.decode()  # strict: an event is whole UTF-8
    assert text.endswith("\n\n"), f"unfinished event: {text[-80:]!r}"
    datas: list[str] = []
    num_pings = 0
    for event in text[:-2].split("\n\n"):
        if event == ": ping":
            num_pings += 1
            continue
        assert event.startswith("data: "), f"not an event: {event!r}"
        assert "\n" not in event, f"more than one line: {event!r}"
        datas.append(event[len("data: ") :])
    assert datas[-1] == "[DONE]", f"no end mark: {datas[-1]!r}"
    assert "[DONE]" not in datas[:-1]
    return [strict_json(data) for data in datas[:-1]], num_pings


@dataclass
class Streamed:
    """What a stream adds up to. `deltas` are the texts of the chunks, empty ones left out."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    logprobs: list[Any] | dict[str, list[Any]] | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    deltas: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    num_pings: int = 0


def check_stream(raw: bytes, *, kind: str = CHAT, include_usage: bool = False) -> Streamed:
    """One choice's stream, chunk by chunk; raises AssertionError at the first chunk out of order."""
    [result] = check_choices(raw, 1, kind=kind, include_usage=include_usage)
    return result


def check_choices(
    raw: bytes, num_choices: int, *, kind: str = CHAT, include_usage: bool = False
) -> list[Streamed]:
    """Several choices' stream: each is whole by itself, and chunks of different ones may alternate. `usage`
    and `chunks` are of the whole stream."""
    chunks, num_pings = parse_events(raw)
    assert chunks, "an empty stream"
    results = [Streamed(chunks=chunks, num_pings=num_pings) for _ in range(num_choices)]
    first = chunks[0]
    assert first["object"] == kind
    assert first["id"].startswith("chatcmpl-" if kind == CHAT else "cmpl-")
    assert isinstance(first["created"], int)
    assert isinstance(first["model"], str)
    if include_usage:
        *chunks, last = chunks
        assert last["choices"] == [], "the last chunk must be the usage chunk"
        _same_reply(first, last)
        for result in results:
            result.usage = last["usage"]
            result.timings = last.get("timings")
    seen: set[int] = set()
    for chunk in chunks:
        assert "error" not in chunk, chunk
        _same_reply(first, chunk)
        [choice] = chunk["choices"]
        index = choice["index"]
        result = results[index]
        assert result.finish_reason is None, "a chunk after the finish reason"
        result.finish_reason = choice["finish_reason"]
        if "timings" in chunk:
            assert result.finish_reason is not None
            result.timings = chunk["timings"]
        _add_choice(result, choice, chunk, kind, is_first=index not in seen)
        seen.add(index)
    for result in results:
        assert result.finish_reason in FINISH_REASONS, f"finish reason: {result.finish_reason!r}"
        result.text = "".join(result.deltas)
    return results


def check_error_stream(raw: bytes) -> tuple[list[Any], dict[str, Any]]:
    """(chunks before it, the error) of a stream that failed after it started: the error event is the last one
    before the end mark, and no chunk claims that the reply is complete."""
    chunks, _ = parse_events(raw)
    *before, last = chunks
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    for chunk in before:
        assert all(choice["finish_reason"] is None for choice in chunk["choices"])
    return before, last["error"]


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if "id" in delta:
        assert delta["index"] == len(calls), "calls come in order"
        assert delta["type"] == "function"
        function = {"name": delta["function"]["name"], "arguments": ""}
        calls.append({"id": delta["id"], "type": "function", "function": function})
    else:
        assert set(delta) == {"index", "function"}
    assert delta["index"] == len(calls) - 1
    calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def _same_reply(first: dict[str, Any], chunk: dict[str, Any]) -> None:
    for name in ("id", "object", "created", "model"):
        assert chunk[name] == first[name], f"`{name}` changed within the stream"


def _add_choice(
    result: Streamed, choice: dict[str, Any], chunk: dict[str, Any], kind: str, *, is_first: bool
) -> None:
    if kind == CHAT:
        delta = choice["delta"]
        assert ("role" in delta) == is_first, "the role comes first and once"
        if is_first:
            assert delta == {"role": "assistant", "content": ""}
        text = delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            _add_call(result.tool_calls, call)
        result.prompt_token_ids = chunk.get("prompt_token_ids", result.prompt_token_ids)
    else:
        text = choice["text"]
        result.prompt_token_ids = choice.get("prompt_token_ids", result.prompt_token_ids)
    if text:
        result.deltas.append(text)
    result.token_ids += choice.get("token_ids", [])
    if choice["logprobs"] is None:
        return
    if kind == CHAT:
        entries = result.logprobs if isinstance(result.logprobs, list) else []
        result.logprobs = entries + choice["logprobs"]["content"]
        return
    columns: dict[str, Any] = result.logprobs if isinstance(result.logprobs, dict) else {}
    for name, values in choice["logprobs"].items():
        columns[name] = None if values is None else (columns.get(name) or []) + values
    result.logprobs = columns
