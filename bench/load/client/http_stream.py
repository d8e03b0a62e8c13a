"""One HTTP answer from bytes: when its headers came, what its events were, and how it ended. No IO, no clock.

1. `feed` gets what one socket read brought, with the moment of that read; `eof` gets the end of the
   connection.
2. The head decides: status 200 is read event by event, unless it is JSON; other bodies are collected. A
   body that the server compressed, unasked, is not read.
3. The verdict falls once: at `[DONE]`, at an error event, at the end of the body, or when the bytes are
   wrong. Bytes that follow `[DONE]` (the last chunk of a chunked body) are read, so that the connection can
   be used again, but change nothing.
4. Whatever goes wrong while these bytes are read, a fault of ours too, is the verdict on this answer alone.
"""

from __future__ import annotations

import httptools
import msgspec

from bench.load.client.answer import Answer
from bench.load.client.replies import body_error
from bench.load.client.sse import Event, SseLines
from bench.load.records import Status
from cluster.errors import ProtocolError

HTTP_OK = 200
MAX_BODY_BYTES = 64 << 20  # of an answer that is not a stream
MAX_OPENING_BYTES = 4096  # of a body without an event, to say what it was instead


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
        self._body = bytearray()  # while there is no event: the opening of a stream
        self._num_events = 0
        self._content_type = ""
        self._encoding = ""
        self._is_framed = (
            False  # content-length or chunked: the end of the connection is not the end of the body
        )
        self._keeps_alive = False
        self._location = ""
        self._moment_ns = 0

    @property
    def can_reuse(self) -> bool:
        """The connection may carry another request."""
        return self.is_message_over and self._keeps_alive and not self.has_garbage

    def feed(self, data: bytes, moment_ns: int) -> None:
        assert self._parser is not None
        self.has_bytes = True
        self._moment_ns = moment_ns
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._give_up(error.__context__ or error)
        except httptools.HttpParserUpgrade:
            self.http_status = self._parser.get_status_code()
            self.has_garbage = True
            self._end(Status.ERROR, f"HTTP {self.http_status}: the server left HTTP, which nobody asked for")
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
            try:
                self._close()
            except Exception as fault:
                self._give_up(fault)
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

    def _give_up(self, fault: BaseException) -> None:
        """The rest of this answer cannot be read. Other requests know nothing of it."""
        self.has_garbage = True
        if isinstance(fault, ProtocolError):
            self._end(Status.ERROR, f"the answer is not what the protocol says: {fault}")
        else:
            self._end(Status.ERROR, f"the client failed to read it: {type(fault).__name__}: {fault}")

    def _close(self) -> None:
        """The body is complete: what is the verdict on it?"""
        if self.verdict is not None:
            return
        answer = self.answer
        if self.http_status != HTTP_OK:
            self._end(Status.REFUSED, f"HTTP {self.http_status}: {self._refusal()}")
            return
        if self._sse is None:
            answer.take_whole(bytes(self._body), self._moment_ns)
        else:
            self._take_events(self._sse.finish())
        if answer.error is not None:
            self._end(Status.ERROR, answer.error)
        elif answer.is_whole:
            self._end(Status.OK)
        elif self._sse is not None and not self._num_events and self._body.strip():
            kind = self._content_type or "no content-type"
            error = f"the answer is no event stream ({kind}): {body_error(bytes(self._body))}"
            self._end(Status.ERROR, error)
        else:
            chunks = count(len(answer.moments_ns), "chunk")
            error = f"the stream ended without finish_reason or [DONE], after {chunks} with content"
            self._end(Status.INCOMPLETE, error)

    def _refusal(self) -> str:
        if self._location:
            return f"redirected to `{self._location}`"
        return self._compressed() if self._encoding else body_error(bytes(self._body))

    def _compressed(self) -> str:
        return f"the server compressed the body ({self._encoding}), though it was not asked to"

    def _take_events(self, events: list[Event]) -> None:
        answer = self.answer
        self._num_events += len(events)
        for data, is_error in events:
            answer.take_event(data, self._moment_ns, is_error)
            if answer.is_over:
                self._end(Status.OK if answer.error is None else Status.ERROR, answer.error)
                return

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode(errors="replace").partition(";")[0].strip().lower()
        elif name == b"content-encoding":
            encoding = value.decode(errors="replace").strip().lower()
            self._encoding = "" if encoding == "identity" else encoding
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
        if status != HTTP_OK:
            return
        if self._encoding:
            self._end(Status.ERROR, self._compressed())
        elif not is_json(self._content_type):
            self._sse = SseLines()

    def on_body(self, body: bytes) -> None:
        if self.verdict is not None:
            return
        if self._sse is not None:
            if not self._num_events and len(self._body) < MAX_OPENING_BYTES:
                self._body += body[:MAX_OPENING_BYTES]
            self._take_events(self._sse.feed(body))
            return
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            raise ProtocolError(f"a body that is not a stream is longer than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self.headers_ns is None:
            return
        assert self._parser is not None
        self.is_message_over = True
        self._keeps_alive = bool(self._parser.should_keep_alive())  # the parser forgets with the next byte
        self._close()


def is_json(content_type: str) -> bool:
    """`application/problem+json` and its like, too; lines of JSON (`application/x-ndjson`) are none."""
    return content_type == "application/json" or content_type.endswith("+json")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
