"""The few lines of HTTP the hot path needs, straight on ASGI: read a body with a limit, send a JSON answer,
notice that the client left.

The generation endpoints do not go through a request or response object. Where the server offers a
`BodyWriter`, a token costs one write to the socket and no turn of the event loop. Functions over `scope`,
`receive` and `send`; no state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

BODY_WRITER = "baton.body_writer"  # key of the scope; not every server offers one
JSON_TYPE = (b"content-type", b"application/json")


class BodyWriter(Protocol):
    """The body of a response that `send` has started, written past the layers in between."""

    def write(self, data: bytes) -> bool:
        """Write the next part at once. False, and nothing is written, when the client reads too slowly, or
        the response has not started or is over: `send` it then."""
        ...


class ClientLeft(Exception):
    """The connection closed before the request was read; there is nobody to answer."""


class UnsupportedMediaType(Exception):
    """The body is not JSON as it stands; the message says what to send."""


class BodyTooLarge(Exception):
    """More bytes came, or were announced, than a request may have."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header; `name` is lower case."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def require_json(scope: Scope) -> None:
    """Browsers cannot send JSON across origins without asking first, so nothing else is taken for it.

    Raises:
        UnsupportedMediaType: the body is not declared as JSON, or it is compressed.
    """
    media_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("Send the request as `Content-Type: application/json`.")
    if (header(scope, b"transfer-encoding") or "chunked").strip().lower() != "chunked":
        raise UnsupportedMediaType("Send the request with no other `Transfer-Encoding` than `chunked`.")
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(
            "Send the request without `Content-Encoding`: bodies are not unpacked here."
        )


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, count: Callable[[int], None] | None = None
) -> bytes:
    """The whole request body; `count` is told of each part, and may raise.

    Raises:
        BodyTooLarge: without reading on, whether the length was announced or not.
        ClientLeft: the client closed the connection first.
    """
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise BodyTooLarge
        if count is not None:
            count(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection (the body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    """One whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
