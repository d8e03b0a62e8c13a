"""One client connection of the shim: requests in, answers and event streams out. Knows no engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from bench.peers.http_parse import BadRequest, HttpRequest, parse_request


class Handler(Protocol):
    """Who answers. Each request is answered on its connection by one `send_json`, `send_error` or
    `begin_events` ... `end_events`, now or later."""

    def handle(self, connection: Connection, request: HttpRequest) -> None: ...
    def abandon(self, request_id: int) -> None: ...


class Connection(asyncio.Protocol):
    """One client connection, kept alive between requests; answers are in order, one at a time."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._buffer = bytearray()
        self._keep_alive = True
        self._busy = False
        self.request_id: int | None = None  # of the completion in work; set and cleared by the server
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.request_id is not None:
            self._handler.abandon(self.request_id)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        """Take the next whole request, if there is one and none is being answered."""
        while not self._busy and not self._transport.is_closing():
            try:
                request = parse_request(self._buffer)
            except BadRequest as error:
                self._keep_alive = False
                self.send_error(error.status, str(error))
                return
            if request is None:
                return
            self._busy = True
            self._keep_alive = request.keep_alive
            self._handler.handle(self, request)

    def send_error(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "internal_error"
        self.send_json(status, {"error": {"message": message, "type": kind, "code": status}})

    def send_json(self, status: int, value: dict[str, Any]) -> None:
        payload = json.dumps(value).encode()
        head = self._head(status, f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n")
        self._transport.write(head + payload)
        self._answered()

    def begin_events(self) -> None:
        self._transport.write(
            self._head(200, "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        )

    def send_event(self, value: dict[str, Any]) -> None:
        self._send_chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def end_events(self) -> None:
        self._send_chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")
        self._answered()

    def _send_chunk(self, payload: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def _head(self, status: int, headers: str) -> bytes:
        connection = "keep-alive" if self._keep_alive else "close"
        return f"HTTP/1.1 {status} {_REASONS[status]}\r\nconnection: {connection}\r\n{headers}\r\n".encode()

    def _answered(self) -> None:
        self._busy = False
        if not self._keep_alive:
            self._transport.close()
        elif (
            self._buffer
        ):  # a further request waits: after this turn, for the answer may be sent from `handle`
            asyncio.get_running_loop().call_soon(self._next)


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    413: "Content Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
