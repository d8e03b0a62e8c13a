"""One connection of the HTTP server: uvicorn's protocol, with bounds where it has none.

1. A head is limited in bytes, and a request must be whole some time after it began (`arrival_s`).
2. An answer that nobody takes is dropped (`stalled_s`), however much of it is left. What a stream does with a
   slow client is its own business (`router.stream`).
3. What is not HTTP gets an error of our shape, unless it would be taken for the answer to an earlier request.
"""

from __future__ import annotations

import asyncio
import uuid

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.asgi import BODY_WRITER
from router.http_one_zero import without_chunks
from router.openai_errors import error_body, http_error


class _BodyWriter:
    """Implements `router.asgi.BodyWriter`: what the cycle's `send` does to a part of a chunked body."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.response_complete or cycle.disconnected:
            return False
        if not cycle.chunked_encoding:  # unknown until the response starts
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _HeadTooLarge(Exception):
    """More bytes of address and headers than a request may have."""


class HttpProtocol(HttpToolsProtocol):
    """An offered upgrade (Java's client offers h2c with every request) is declined as HTTP says, by serving
    the request; uvicorn would drop its body."""

    max_head_bytes = 64 * 2**10
    arrival_s = 60.0
    stalled_s = 120.0
    _reading: asyncio.TimerHandle | None = None
    _arrival: asyncio.TimerHandle | None = None
    _is_arriving = False
    _resuming = False
    _in_head = False
    _began = _had_body = False  # a head, and a part of a body, in the data that is being parsed
    _head_bytes = 0  # of the request whose head is being read: parsed,
    _raw_head_bytes = 0  # and received
    _is_head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_whole()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            self._began = self._had_body = False
            try:
                self.parser.feed_data(data)
                if self._in_head:  # the parser tells of a line when it is complete, and this may have no end
                    self._raw_head_bytes += self._num_head_bytes(data)
                    self._check_head(self._raw_head_bytes)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()
            except (httptools.HttpParserError, _HeadTooLarge):
                self._refuse()
                return

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._expect_request()
            self._in_head = self._began = self._is_arriving = True
            self._head_bytes = self._raw_head_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resuming:
            self._count_head(len(name) + len(value))
            if self._in_head:  # what trails a body is no header: nobody on the way looked at it
                super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._resuming:
            super().on_headers_complete()
            if self.cycle is not None:
                self.scope[BODY_WRITER] = _BodyWriter(self.cycle)  # type: ignore[literal-required]
                if self.scope["http_version"] == "1.0":
                    self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._had_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._request_is_whole()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        self._expect_reading(answered, self.transport.get_write_buffer_size())

    def send_400_response(self, msg: str) -> None:
        self._answer(400, b"Bad Request", msg)

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(self.arrival_s, self._too_slow)

    def _request_is_whole(self) -> None:
        self._is_arriving = False
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        self._arrival = None
        is_answered = self.cycle is not None and self.cycle.response_started and not self._in_head
        if self._is_arriving and not is_answered:
            self._answer(408, b"Request Timeout", f"The request did not arrive within {self.arrival_s:g} s.")
        else:  # nothing came, or it was refused while its body was still coming
            self.transport.close()

    def _expect_reading(self, answered: RequestResponseCycle | None, num_left: int) -> None:
        """Of an answer that is written, so much waits for the client."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if num_left:
            self._reading = self.loop.call_later(self.stalled_s, self._look_at_reading, answered, num_left)

    def _look_at_reading(self, answered: RequestResponseCycle | None, num_left: int) -> None:
        num_left_now = self.transport.get_write_buffer_size()
        if self.cycle is answered and num_left_now >= num_left:
            self.transport.abort()  # closing it would wait for the client
        else:
            self._expect_reading(self.cycle, num_left_now)

    def _num_head_bytes(self, data: bytes) -> int:
        """How much of `data` belongs to the head that is not complete yet; where it cannot be told, less."""
        if not self._began:
            return len(data)
        return 0 if self._had_body else len(data) - (data.rfind(b"\r\n\r\n") + 1)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        self._check_head(self._head_bytes)

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > self.max_head_bytes:
            self._is_head_too_large = True
            raise _HeadTooLarge

    def _refuse(self) -> None:
        if self._is_head_too_large:
            limit = self.max_head_bytes
            message = f"The address and headers of a request may have at most {limit} bytes."
            self._answer(431, b"Request Header Fields Too Large", message)
        else:
            self.send_400_response("Invalid HTTP request.")

    def _answer(self, status: int, phrase: bytes, message: str) -> None:
        if self._is_another_first():  # this would be taken for its answer, or a part of it
            self.transport.close()
            return
        body = error_body(http_error(status, message))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: req-%b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, phrase, uuid.uuid4().hex.encode(), len(body), body)
        )
        self.transport.close()

    def _is_another_first(self) -> bool:
        """A request that came before is not answered yet, or the answer to this one has begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return cycle.response_started or self._in_head or not self._is_arriving or bool(self.pipeline)

    def _decline_upgrade(self) -> None:
        """The parser stopped after the headers: a new one takes up the body, with the same framing."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % item for item in self.headers if item[0] in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines))
        self.parser.feed_data(b"\r\n")
        self._resuming = False
