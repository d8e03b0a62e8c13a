"""Bodies that have arrived and are no requests yet: in all no more than there is room for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Overloaded
from router.bodies import FREE_BYTES, Bodies
from router.limits import GatewayLimits
from tests.support.gateway import RunningGateway, check_error, running_gateway

LARGE = 300_000


@given(parts=st.lists(st.lists(st.integers(0, 3 * FREE_BYTES), max_size=6), max_size=6))
def test_what_is_counted_is_given_back(parts: list[list[int]]) -> None:
    most = 5 * FREE_BYTES
    bodies = Bodies(most)
    with ExitStack() as stack:
        sizes = []
        for body in parts:
            held = stack.enter_context(bodies.hold())
            size = 0
            for part in body:
                try:
                    held.add(part)
                except Overloaded:
                    break
                size += part
            sizes.append(size)
            assert bodies.num_bytes <= most
        assert bodies.num_bytes == sum(max(0, size - FREE_BYTES) for size in sizes)
    assert bodies.num_bytes == 0


@pytest.fixture
def tight(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    """Room for one large body."""
    limits = GatewayLimits(max_body_bytes=LARGE, max_bodies_bytes=LARGE)
    with running_gateway(tokenizer_dir, limits=limits) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_one_that_is_being_sent_leaves_no_room_for_another_large_one(
    tight: RunningGateway, path: str
) -> None:
    large = {"prompt": "x" * 200_000, "truncate_prompt_tokens": 5}
    with socket.create_connection(("127.0.0.1", tight.port), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + b" " * (LARGE - 1000))
        while tight.app.state.bodies.num_bytes < LARGE - 1000 - FREE_BYTES:
            assert tight.client.get("/health").status_code == 200
        response = tight.complete(**large)
        check_error(response, 503, code="overloaded")
        assert response.headers["retry-after-ms"] == "1000"
        assert (
            tight.complete(prompt="x" * 50_000, truncate_prompt_tokens=5).status_code == 200
        )  # not so large
    while tight.app.state.bodies.num_bytes:  # it left
        assert tight.client.get("/health").status_code == 200
    assert tight.complete(**large).status_code == 200
    assert tight.app.state.bodies.num_bytes == 0
    metrics = tight.client.get("/metrics").text
    assert 'baton_request_total{outcome="overloaded"} 1.0' in metrics


def test_what_is_refused_gives_back_what_it_took(tight: RunningGateway) -> None:
    for body, status in (
        (b"{" + b" " * 250_000, 400),
        (json.dumps({"prompt": "x" * 250_000, "temperature": 9}).encode(), 400),
        (b" " * (LARGE + 1), 413),
    ):
        for _ in range(3):
            response = tight.client.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            check_error(response, status)
    assert tight.app.state.bodies.num_bytes == 0
