"""HTTP as the mock server speaks it: requests in, pieces of an answer out, each piece a write of its own.

A script says how the body is framed, whether the connection stays open, and into what slices the bytes are
cut.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

import httptools

from bench.load.mock.script import Script


class Exchange(Protocol):
    """What answers a request after it was read."""

    def client_left(self) -> None: ...


class Host(Protocol):
    """Whose connections these are."""

    def connected(self, connection: MockConnection) -> int:
        """The connection's number."""
        ...

    def disconnected(self, connection: MockConnection) -> None: ...

    def handle(self, connection: MockConnection, path: str, body: bytes) -> Exchange | None:
        """Answer at once and return None, or return what will."""
        ...


class MockConnection(asyncio.Protocol):
    """One client connection, one request at a time."""

    def __init__(self, host: Host) -> None:
        self.number = 0
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._exchange: Exchange | None = None
        self._script = Script()

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def begin_stream(self, script: Script) -> None:
        self._script = script
        framing = b"transfer-encoding: chunked\r\n" if script.framing == "chunked" else b""
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"cache-control: no-cache\r\n%b%b\r\n"
            % (framing, b"" if self._stays_open else b"connection: close\r\n")
        )

    def write_piece(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._script.framing == "chunked" else data)

    def end_stream(self) -> None:
        if self._script.framing == "chunked":
            self._write(b"0\r\n\r\n")
        self._next_request(self._stays_open)

    def reply(
        self, status: int, body: bytes, kind: bytes = b"application/json", keep_alive: bool = True
    ) -> None:
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            *(status, b"OK" if status == 200 else b"Scripted", kind, len(body)),
            b"" if keep_alive else b"connection: close\r\n",
        )
        self._write(head + body)
        self._next_request(keep_alive)

    def break_off(self, is_reset: bool) -> None:
        if is_reset:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _stays_open(self) -> bool:
        return self._script.keep_alive and self._script.framing == "chunked"

    def _write(self, data: bytes) -> None:
        size = self._script.split_bytes or len(data)
        for start in range(0, len(data), size):
            self.transport.write(data[start : start + size])

    def _next_request(self, stays_open: bool) -> None:
        self._exchange = None
        self._script = Script()
        if not stays_open:
            self.transport.close()

    # What the event loop and httptools call.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # each write goes out at once
        self.number = self._host.connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.disconnected(self)
        if self._exchange is not None:
            self._exchange.client_left()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.split(b"?")[0].decode(errors="replace")
        self._exchange = self._host.handle(self, path, bytes(self._body))
