"""JSON from clients, of bounded depth: what walks through it later never runs out of stack.

orjson itself reads a thousand levels. Templates, schema compilers and `json` walk values by recursion, and
each gives up at a depth of its own, deep inside a request. So depth is bounded where text becomes a value.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from cluster.request_config import MAX_JSON_DEPTH

MAX_DEPTH: Final = MAX_JSON_DEPTH


def loads(text: bytes | str, most: int = MAX_DEPTH) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested more than `most` deep.
    """
    value = orjson.loads(text)
    if _num_openings(text) > most:
        check_depth(value, most)
    return value


def check_depth(value: Any, most: int) -> None:
    """Raises ValueError: it is nested more than `most` deep."""
    if _is_deeper(value, most):
        raise ValueError(f"it is nested more than {most} deep")


def _num_openings(text: bytes | str) -> int:
    """At least as many as it is deep."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deeper(value: Any, most: int) -> bool:
    """Level by level: the containers of each."""
    level = [value] if isinstance(value, dict | list | tuple) else []
    depth = 0
    while level and depth <= most:
        depth += 1
        level = [
            item
            for part in level
            for item in (part.values() if isinstance(part, dict) else part)
            if isinstance(item, dict | list | tuple)
        ]
    return depth > most
