"""What a server's words mean beside the content of an answer: JSON read leniently, errors, quotes. No state.

Servers write JSON that strict parsers refuse: bytes that are no UTF-8, half a surrogate pair, `-Infinity`
among log-probabilities. None of that makes a measured moment wrong, so `read_json` reads it, with U+FFFD or
`?` for what is no character and null for what is no number. What figures are computed from is checked where
it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from cluster.errors import ProtocolError

MAX_QUOTED_CHARS = 300
MAX_COUNT = 1 << 31  # no answer has more tokens
MAX_SHOWN_CHARS = 40
KIND_NAMES: Mapping[type, str] = {dict: "object", list: "list", str: "string", int: "whole number"}
T = TypeVar("T")


def read_json(data: bytes) -> Any:
    """
    Raises:
        ProtocolError: it is not JSON, even read leniently.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        refusal = error
    try:
        value = json.loads(data.decode("utf-8-sig", errors="replace"), parse_constant=lambda _: None)
        # Once more through the strict parser: all that comes out of here has one kind of text and number.
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON ({refusal})") from None


def read_count(owner: dict[str, Any], name: str) -> int | None:
    """A number of tokens, 4.0 as good as 4; None if it is missing or null.

    Raises:
        ProtocolError: it is something else, negative, or above `MAX_COUNT`: figures from it would be wrong.
    """
    value = owner.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ProtocolError(f"`{name}` is {shown(value)} and no number of tokens")
    return value


def checked(value: object, kind: type[T], name: str) -> T:
    """
    Raises:
        ProtocolError: `value` is not of this kind.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ProtocolError(f"`{name}` is {shown(value)} and no {KIND_NAMES[kind]}")
    return value


def shown(value: object) -> str:
    """A JSON value, short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def event_error(event: dict[str, Any]) -> str | None:
    """The message of an error object: `{"error": {"message"}}`, `{"error": "…"}`, `{"object": "error",
    "message"}` or FastAPI's `{"detail"}`."""
    error = event.get("error")
    if isinstance(error, dict):
        return one_line(error.get("message") or error)
    if error:
        return one_line(error)
    if event.get("object") == "error":
        return one_line(event.get("message") or event)
    if "detail" in event and "choices" not in event:
        return one_line(event["detail"])
    return None


def body_error(body: bytes) -> str:
    """What the body of a refusal says, in one line; plain text and HTML are quoted."""
    try:
        reply = read_json(body)
    except ProtocolError:
        return quote(body) if body.strip() else "no reason given"
    message = event_error(reply) or reply.get("message") if isinstance(reply, dict) else None
    return one_line(message) if message else quote(body)


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def quote(data: bytes) -> str:
    text = one_line(data.decode(errors="replace"))
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"
