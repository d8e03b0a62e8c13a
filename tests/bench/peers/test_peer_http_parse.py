import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers.http_parse import MAX_HEAD_BYTES, BadRequest, HttpRequest, parse_request

ONE = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyz"
TWO = b"GET /b HTTP/1.1\r\nConnection: close\r\n\r\n"


@given(st.lists(st.integers(1, len(ONE + TWO)), max_size=12))
def test_any_division_into_reads_gives_the_same_requests(cuts: list[int]) -> None:
    buffer, found = bytearray(), []
    whole = ONE + TWO
    edges = sorted({0, *cuts, len(whole)})
    for start, end in itertools.pairwise(edges):
        buffer += whole[start:end]
        while (request := parse_request(buffer)) is not None:
            found.append(request)
    assert found == [HttpRequest("POST", "/a", b"xyz", True), HttpRequest("GET", "/b", b"", False)]
    assert buffer == b""


def test_http_1_0_closes_unless_it_says_otherwise() -> None:
    for headers, keeps in ((b"", False), (b"Connection: Keep-Alive\r\n", True)):
        request = parse_request(bytearray(b"GET / HTTP/1.0\r\n" + headers + b"\r\n"))
        assert request is not None
        assert request.keep_alive is keeps


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 501),
        (b"x" * (MAX_HEAD_BYTES + 1), 413),
    ],
)
def test_what_can_never_be_served(data: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(bytearray(data))
    assert caught.value.status == status
