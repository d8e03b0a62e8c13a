"""One HTTP answer from bytes: when its headers came, what its events were, and how it ended. No IO, no clock.

1. `feed` gets what one socket read brought, with the moment of that read; `eof` gets the end of the
   connection.
2. The head decides: status 200 with an event stream is read event by event; other bodies are collected.
3. The verdict falls once: at `[DONE]`, at an error event, at the end of the body, or when the bytes are
   wrong. Bytes that follow `[DONE]` (the last chunk of a chunked body) are read, so that the connection can
   be used again, but change nothing.
"""

from __future__ import annotations

import httptools
import msgspec

from bench.load.answer import Answer, body_error
from bench.load.records import Status
from bench.load.sse import SseLines
from cluster.errors import ProtocolError

HTTP_OK = 200
MAX_BODY_BYTES = 64 << 20  # of an answer that is not a stream


class Verdict(msgspec.Struct, frozen=True):
    status: Status
    moment_ns: int
    error: str | None = None  # one sentence, for statuses other than OK


class ResponseStream:
    """Reads one answer. `verdict` is None until it falls; `is_message_over`: HTTP's own framing ended."""

    def __init__(self, keep_text: bool) -> None:
        self.answer = Answer(keep_text)
        self.headers_ns: int | None = None
        self.http_status: int | None = None
        self.verdict: Verdict | None = None
        self.is_message_over = False
        self.has_bytes = False
        self.has_garbage = False  # bytes that are not HTTP, or follow the message
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._sse: SseLines | None = None  # None: the body is collected
        self._body = bytearray()
        self._is_json = False
        self._is_framed = (
            False  # content-length or chunked: the end of the connection is not the end of the body
        )
        self._location = ""
        self._moment_ns = 0

    @property
    def can_reuse(self) -> bool:
        """The connection may carry another request."""
        is_clean = self.is_message_over and self._is_framed and not self.has_garbage
        return is_clean and self._parser is not None and bool(self._parser.should_keep_alive())

    def feed(self, data: bytes, moment_ns: int) -> None:
        assert self._parser is not None
        self.has_bytes = True
        self._moment_ns = moment_ns
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, ProtocolError):
                raise
            self.has_garbage = True
            self._end(Status.ERROR, f"the answer is not what the protocol says: {error.__context__}")
        except httptools.HttpParserError as error:
            self.has_garbage = True
            self._end(Status.ERROR, f"the answer is not HTTP: {error}")

    def eof(self, moment_ns: int, error: Exception | None) -> None:
        """The connection ended: `error` is None for an orderly close."""
        self._moment_ns = moment_ns
        if self.verdict is not None:
            return
        if error is not None:
            self._end(Status.CONNECTION, f"the connection broke {self._progress()}: {error}")
        elif self.headers_ns is not None and not self._is_framed:
            self._close()
        else:
            self._end(Status.CONNECTION, f"the server closed the connection {self._progress()}")

    def close(self) -> None:
        """No more bytes will come: part stream and parser, which hold each other."""
        self._parser = None

    def _progress(self) -> str:
        if not self.has_bytes:
            return "before it answered"
        if self.headers_ns is None:
            return "inside the headers"
        return f"inside the answer, after {count(len(self.answer.moments_ns), 'chunk')} with content"

    def _end(self, status: Status, error: str | None = None) -> None:
        if self.verdict is None:
            self.verdict = Verdict(status, self._moment_ns, error)

    def _close(self) -> None:
        """The body is complete: what is the verdict on it?"""
        if self.verdict is not None:
            return
        answer = self.answer
        if self.http_status != HTTP_OK:
            reason = f"redirected to `{self._location}`" if self._location else body_error(bytes(self._body))
            self._end(Status.REFUSED, f"HTTP {self.http_status}: {reason}")
            return
        if self._sse is None:
            answer.take_whole(bytes(self._body), self._moment_ns)
        else:
            self._take_events(self._sse.finish())
        if answer.error is not None:
            self._end(Status.ERROR, answer.error)
        elif answer.is_whole:
            self._end(Status.OK)
        else:
            chunks = count(len(answer.moments_ns), "chunk")
            error = f"the stream ended without finish_reason or [DONE], after {chunks} with content"
            self._end(Status.INCOMPLETE, error)

    def _take_events(self, events: list[bytes]) -> None:
        answer = self.answer
        for data in events:
            answer.take_event(data, self._moment_ns)
            if answer.is_over:
                self._end(Status.OK if answer.error is None else Status.ERROR, answer.error)
                return

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_json = value.lower().startswith(b"application/json")
        elif name == b"transfer-encoding" or name == b"content-length":
            self._is_framed = True
        elif name == b"location":
            self._location = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < HTTP_OK:
            return  # an interim answer; the real one follows
        self.http_status = status
        self.headers_ns = self._moment_ns
        if status == HTTP_OK and not self._is_json:
            self._sse = SseLines()

    def on_body(self, body: bytes) -> None:
        if self.verdict is not None:
            return
        if self._sse is not None:
            self._take_events(self._sse.feed(body))
            return
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            raise ProtocolError(f"a body that is not a stream is longer than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self.headers_ns is None:
            return
        self.is_message_over = True
        self._close()


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
