"""Streams for clients of HTTP/1.0, which know no chunks: the body as it is, ended by closing the connection.

uvicorn would send them chunks; an old client then shows the lengths of chunks as text. It writes a body of
known length unframed, so here the length is told to it part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class Cycle(Protocol):
    """The part of uvicorn's that is used."""

    chunked_encoding: bool | None
    expected_content_length: int

    async def send(self, message: Any) -> None: ...


def without_chunks(cycle: Cycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """What takes the place of the cycle's `send`. Answers that tell their length are sent as ever; the cycle
    of such a request closes its connection after the answer anyway."""
    send = cycle.send
    is_open_ended = False

    async def send_unframed(message: Any) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = not any(name.lower() == b"content-length" for name, _ in message["headers"])
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed
