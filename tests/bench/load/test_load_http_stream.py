"""Bytes and moments in, what a record holds out: nothing waits or reads a clock, so figures are exact."""

import gzip

import pytest

from bench.load.client.answer import Answer
from bench.load.client.http_stream import ResponseStream, Verdict
from bench.load.records import Status

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CLOSED = HEAD + b"Connection: close\r\n\r\n"
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % text.encode()


EVENTS = [b": ping\n\n", event("a"), event("b"), event("c"), LAST, USAGE, DONE]
BODY = b"".join(EVENTS)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def with_length(status: bytes, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        kind,
        len(body),
        body,
    )


WHOLE = {
    "chunked": CHUNKED + b"".join(chunk(data) for data in EVENTS) + b"0\r\n\r\n",
    "chunked, two events each": CHUNKED + chunk(BODY[:150]) + chunk(BODY[150:]) + b"0\r\n\r\n",
    "length": with_length(b"200 OK", BODY, b"text/event-stream; charset=utf-8"),
    "close": CLOSED + BODY,
}


def read(*reads: bytes) -> ResponseStream:
    """Read i comes at moment i."""
    stream = ResponseStream(keep_text=True)
    for moment, data in enumerate(reads):
        stream.feed(data, moment)
    return stream


def verdict(stream: ResponseStream) -> Verdict:
    assert stream.verdict is not None
    return stream.verdict


@pytest.mark.parametrize("framing", WHOLE)
def test_the_answer_does_not_depend_on_where_the_bytes_are_cut(framing: str) -> None:
    data = WHOLE[framing]
    for cut in range(1, len(data)):
        stream = read(data[:cut], data[cut:])
        assert verdict(stream).status is Status.OK
        assert "".join(stream.answer.text_parts) == "abc"
        assert len(stream.answer.moments_ns) == 3
        assert (stream.answer.input_tokens, stream.answer.output_tokens) == (2, 3)
    stream = read(*(data[position : position + 1] for position in range(len(data))))
    assert verdict(stream).status is Status.OK
    assert len(set(stream.answer.moments_ns)) == 3


def test_a_chunk_has_the_moment_of_the_read_that_completed_it() -> None:
    first = event("a")
    stream = ResponseStream(keep_text=False)
    stream.feed(CHUNKED, 100)
    stream.feed(chunk(first)[:-10], 200)  # not whole yet
    assert stream.answer.moments_ns == []
    stream.feed(chunk(first)[-10:] + chunk(event("b")) + chunk(event("c")[:5]), 300)
    stream.feed(chunk(event("c")[5:]), 400)
    stream.feed(chunk(LAST), 500)
    assert stream.verdict is None
    stream.feed(chunk(DONE), 600)
    assert stream.headers_ns == 100
    assert stream.answer.moments_ns == [300, 300, 400]
    assert verdict(stream) == Verdict(Status.OK, 600)
    assert not stream.can_reuse
    stream.feed(b"0\r\n\r\n", 700)
    assert verdict(stream).moment_ns == 600
    assert stream.can_reuse


@pytest.mark.parametrize(("framing", "is_reusable"), [("chunked", True), ("length", True), ("close", False)])
def test_reuse_needs_a_framed_message(framing: str, is_reusable: bool) -> None:
    assert read(WHOLE[framing]).can_reuse is is_reusable


def test_no_reuse_when_the_server_says_so_or_sends_more_than_the_message() -> None:
    head = CHUNKED.replace(b"Transfer", b"Connection: close\r\nTransfer")
    assert not read(head + chunk(BODY) + b"0\r\n\r\n").can_reuse
    stream = read(WHOLE["chunked"] + b"garbage")
    assert verdict(stream).status is Status.OK
    assert not stream.can_reuse


def test_an_end_without_done_is_whole_with_a_finish_reason_only() -> None:
    stream = read(CHUNKED, chunk(event("a")), chunk(LAST), b"0\r\n\r\n")
    assert verdict(stream) == Verdict(Status.OK, 3)
    stream = read(CHUNKED, chunk(event("a")), b"0\r\n\r\n")
    assert verdict(stream).status is Status.INCOMPLETE
    assert (
        verdict(stream).error
        == "the stream ended without finish_reason or [DONE], after 1 chunk with content"
    )


def test_the_close_ends_a_body_without_framing() -> None:
    stream = read(CLOSED + event("a"))
    stream.eof(5, None)
    assert verdict(stream).status is Status.INCOMPLETE
    stream = read(CLOSED + event("a") + LAST.strip())
    assert stream.verdict is None
    stream.eof(5, None)
    assert verdict(stream) == Verdict(Status.OK, 5)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "before it answered"),
        (b"HTTP/1.1 200", "inside the headers"),
        (CHUNKED, "inside the answer, after 0 chunks with content"),
        (CHUNKED + chunk(event("a")), "inside the answer, after 1 chunk with content"),
        (CHUNKED + chunk(event("a")) + chunk(LAST), "inside the answer, after 1 chunk with content"),
    ],
)
def test_a_connection_that_ends_early(sent: bytes, error: str) -> None:
    stream = read(sent) if sent else read()
    stream.eof(9, None)
    assert verdict(stream) == Verdict(Status.CONNECTION, 9, f"the server closed the connection {error}")
    stream = read(sent) if sent else read()
    stream.eof(9, ConnectionResetError(104, "Connection reset by peer"))
    assert verdict(stream).error == f"the connection broke {error}: [Errno 104] Connection reset by peer"


def test_an_error_event_after_200_ends_it_with_the_servers_words() -> None:
    error = b'data: {"error":{"message":"worker lost"}}\n\n'
    stream = read(CHUNKED, chunk(event("a")), chunk(error), chunk(DONE) + b"0\r\n\r\n")
    assert verdict(stream) == Verdict(Status.ERROR, 2, "worker lost")
    assert stream.can_reuse


def test_a_refusal_is_told_in_the_servers_words() -> None:
    stream = read(with_length(b"503 Service Unavailable", b'{"error":{"message":"no room"}}'))
    assert verdict(stream) == Verdict(Status.REFUSED, 0, "HTTP 503: no room")
    assert stream.http_status == 503
    assert read(with_length(b"404 Not Found", b"")).verdict == Verdict(
        Status.REFUSED, 0, "HTTP 404: no reason given"
    )


def test_a_redirect_names_where_to() -> None:
    stream = read(b"HTTP/1.1 307 Moved\r\nlocation: /v2\r\ncontent-length: 0\r\n\r\n")
    assert verdict(stream).error == "HTTP 307: redirected to `/v2`"


def test_an_interim_answer_is_not_the_answer() -> None:
    stream = read(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", WHOLE["chunked"])
    assert verdict(stream).status is Status.OK
    assert stream.headers_ns == 1


def test_json_with_200_is_an_answer_in_one_piece_or_an_error() -> None:
    choice = b'{"index":0,"text":"abc","finish_reason":"stop"}'
    reply = b'{"choices":[%b],"usage":{"prompt_tokens":1,"completion_tokens":3}}' % choice
    stream = read(with_length(b"200 OK", reply))
    assert verdict(stream).status is Status.OK
    assert stream.answer.moments_ns == [0]
    stream = read(with_length(b"200 OK", b'{"error":{"message":"late"}}'))
    assert verdict(stream) == Verdict(Status.ERROR, 0, "late")
    stream = read(with_length(b"200 OK", b"{}"))
    assert verdict(stream).status is Status.INCOMPLETE


def test_bytes_that_are_not_http() -> None:
    stream = read(b"SSH-2.0-OpenSSH_9.2\r\n")
    assert verdict(stream).status is Status.ERROR
    assert "not HTTP" in (verdict(stream).error or "")
    assert stream.has_garbage


def test_broken_chunk_framing() -> None:
    stream = read(CHUNKED + chunk(event("a")) + b"zz\r\n")
    assert verdict(stream).status is Status.ERROR
    assert stream.has_garbage


def test_an_endless_event_line_is_an_error_of_the_answer() -> None:
    data = b"x" * (1 << 20)
    stream = read(CHUNKED, *([chunk(data)] * 9))
    assert verdict(stream).status is Status.ERROR
    assert "longer than" in (verdict(stream).error or "")


def test_another_protocol_is_an_error_of_the_answer() -> None:
    stream = read(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nhi")
    assert verdict(stream) == Verdict(
        Status.ERROR, 0, "HTTP 101: the server left HTTP, which nobody asked for"
    )
    assert not stream.can_reuse


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_fault_of_ours_costs_the_answer_it_befell(monkeypatch: pytest.MonkeyPatch, framing: str) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such thing")

    data = WHOLE[framing].removesuffix(b"\n\n")  # the close completes the last event
    monkeypatch.setattr(Answer, "_take_chunk", fail)
    stream = read(data)
    stream.eof(1, None)
    assert verdict(stream).status is Status.ERROR
    assert verdict(stream).error == "the client failed to read it: LookupError: no such thing"
    assert not stream.can_reuse


def test_a_fault_of_ours_at_the_close_costs_the_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such thing")

    stream = read(CLOSED + event("a"), LAST.strip())
    monkeypatch.setattr(Answer, "_take_chunk", fail)
    stream.eof(7, None)
    assert verdict(stream) == Verdict(
        Status.ERROR, 7, "the client failed to read it: LookupError: no such thing"
    )


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (b"text/plain", b'{"error":{"message":"boom"}}', "the answer is no event stream (text/plain): boom"),
        (b"text/html", b"<p>log\nin</p>", "the answer is no event stream (text/html): <p>log in</p>"),
        (b"application/x-ndjson", b'{"a":1}\n', "the answer is no event stream (application/x-ndjson): "),
        (b"application/problem+json; charset=x", b'{"error":{"message":"boom"}}', "boom"),
    ],
)
def test_what_is_no_stream_is_told_in_its_own_words(kind: bytes, body: bytes, error: str) -> None:
    stream = read(with_length(b"200 OK", body, kind))
    assert verdict(stream).status is Status.ERROR
    assert (verdict(stream).error or "").startswith(error)


@pytest.mark.parametrize(
    ("status", "found", "start"),
    [(b"200 OK", Status.ERROR, ""), (b"500 Oh", Status.REFUSED, "HTTP 500: ")],
)
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_a_compressed_body_is_said_to_be_one(status: bytes, found: Status, start: str, kind: bytes) -> None:
    data = with_length(status, gzip.compress(BODY), kind + b"\r\ncontent-encoding: gzip")
    stream = read(data)
    why = f"{start}the server compressed the body (gzip), though it was not asked to"
    assert verdict(stream) == Verdict(found, 0, why)


def test_a_body_that_says_it_is_itself_is_not_compressed() -> None:
    data = WHOLE["length"].replace(b"content-length", b"content-encoding: identity\r\ncontent-length")
    assert verdict(read(data)).status is Status.OK


def test_an_error_beside_content_and_one_by_name_end_the_answer() -> None:
    for data in (b'event: error\ndata: {"message":"boom"}\n\n', b'error: {"code":5,"message":"boom"}\n\n'):
        stream = read(CHUNKED, chunk(event("a")), chunk(data) + chunk(DONE) + b"0\r\n\r\n")
        assert verdict(stream) == Verdict(Status.ERROR, 1 + 1, "boom")
