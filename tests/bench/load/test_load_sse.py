from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.sse import BYTE_ORDER_MARK, MAX_EVENT_BYTES, Event, SseLines
from cluster.errors import ProtocolError

PAYLOADS = st.lists(
    st.binary(min_size=1, max_size=12).filter(lambda data: not set(data) & set(b"\r\n ")), max_size=6
)
NOISE = st.sampled_from([b"", b": ping", b"event: message", b"id: 7", b"retry: 1", b"unknown"])


def read_all(body: bytes, cuts: list[int]) -> list[bytes]:
    events = read_events(body, cuts)
    assert not any(event.is_error for event in events)
    return [event.data for event in events]


def read_events(body: bytes, cuts: list[int]) -> list[Event]:
    lines = SseLines()
    events: list[Event] = []
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        events += lines.feed(body[start:end])
    return events + lines.finish()


@given(
    PAYLOADS,
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"data: ", b"data:"]),
    NOISE,
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_events_do_not_depend_on_cuts_line_ends_or_noise(
    payloads: list[bytes], end: bytes, prefix: bytes, noise: bytes, cuts: list[int]
) -> None:
    body = b"".join(noise + end + prefix + payload + end + end for payload in payloads)
    assert read_all(body, cuts) == payloads


def test_every_single_byte_cut_of_a_mixed_body() -> None:
    body = b': ping\n\ndata: {"a":1}\r\n\r\ndata:{"b":2}\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
    expected = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]
    for cut in range(len(body) + 1):
        assert read_all(body, [cut]) == expected
    assert read_all(body, list(range(len(body)))) == expected


def test_an_event_is_out_with_its_empty_line_and_not_before() -> None:
    lines = SseLines()
    assert lines.feed(b"data: x\n") == []
    assert lines.feed(b"\n") == [Event(b"x")]


def test_a_carriage_return_at_the_end_of_a_read_is_a_line_end() -> None:
    lines = SseLines()
    assert lines.feed(b"data: x\r") == []
    assert lines.feed(b"\n\r") == [Event(b"x")]
    assert lines.feed(b"\ndata: y\n\n") == [Event(b"y")]


@pytest.mark.parametrize("rest", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"])
def test_the_end_of_the_body_ends_the_last_event(rest: bytes) -> None:
    assert read_all(rest, []) == [b"[DONE]"]


def test_nothing_pending_means_no_event_at_the_end() -> None:
    assert read_all(b"data: x\n\n: bye\n", []) == [b"x"]


@pytest.mark.parametrize("piece", [b"x" * 65_536, b"data: " + b"x" * 65_536 + b"\n", b"data: x\n" * 8192])
def test_an_endless_line_or_event_is_refused(piece: bytes) -> None:
    """One that no read ends, and lines that no empty line ends."""
    lines = SseLines()
    lines.feed(b"data: ")
    num = MAX_EVENT_BYTES // piece.count(b"x") + 2
    with pytest.raises(ProtocolError, match=f"longer than {MAX_EVENT_BYTES} bytes"):
        assert [lines.feed(piece) for _ in range(num)] == []


def test_what_is_left_out_may_be_endless() -> None:
    lines = SseLines()
    comment = b": " + b"x" * 65_534 + b"\n"
    for _ in range(MAX_EVENT_BYTES // len(comment) + 2):
        assert lines.feed(comment[:9]) == lines.feed(comment[9:]) == []
    assert lines.feed(b"data: a\n\n") == [Event(b"a")]


def test_a_long_event_comes_whole_from_many_reads() -> None:
    text = bytes(range(33, 127)) * 20_000
    body = b"data: a\ndata: %b\ndata: z\n\n" % text
    lines = SseLines()
    events = [
        event for start in range(0, len(body), 10_007) for event in lines.feed(body[start : start + 10_007])
    ]
    assert events == [Event(b"a\n" + text + b"\nz")]


@pytest.mark.parametrize(
    "body",
    [
        b'event: error\ndata: {"message":"boom"}\n\n',
        b'data:{"message":"boom"}\r\nevent:error\r\n\r\n',
        b'error:{"message":"boom"}\n\n',
    ],
)
def test_an_event_named_error_is_marked_and_the_next_is_not(body: bytes) -> None:
    expected = [Event(b"a"), Event(b'{"message":"boom"}', is_error=True), Event(b"[DONE]")]
    for cut in range(len(body)):
        assert read_events(b"event: x\ndata: a\n\n" + body + b"data: [DONE]\n\n", [cut]) == expected


def test_an_error_without_a_word_is_one_too() -> None:
    assert read_events(b"event: error\n\n", []) == [Event(b"", is_error=True)]


def test_a_byte_order_mark_hides_nothing() -> None:
    body = BYTE_ORDER_MARK + b"data: a\n\ndata: b\n\n"
    for cut in range(len(body)):
        assert read_all(body, [cut]) == [b"a", b"b"]
