"""What the first Ctrl-C says, and where the number in it comes from."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from cluster.drain_notice import count_open, drain_notice
from tests.support.web_server import WebServer


@pytest.fixture
def routers() -> Iterator[list[WebServer]]:
    with WebServer() as first, WebServer() as second:
        for server, num_open in ((first, 2), (second, 1)):
            server.answers["/cluster"] = (200, json.dumps({"in_flight": num_open}).encode())
        yield [first, second]


def test_the_open_requests_of_all_routers_are_counted(
    routers: list[WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.drain_notice.ASK_WITHIN_S", 20.0)  # however late their answers
    assert count_open([server.url for server in routers]) == 3
    assert count_open([routers[0].url]) == 2


@pytest.mark.parametrize("answer", [(404, b"{}"), (200, b"{}"), (200, b"[]"), (200, b"no"), (200, b"null")])
def test_a_router_that_does_not_say_leaves_the_number_open(
    routers: list[WebServer], answer: tuple[int, bytes]
) -> None:
    routers[1].answers["/cluster"] = answer
    assert count_open([server.url for server in routers]) is None


def test_a_router_that_is_gone_or_hangs_is_not_waited_for(routers: list[WebServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert count_open([hanging, routers[0].url]) is None
    assert count_open([hanging]) is None


@pytest.mark.parametrize(
    ("num_open", "line"),
    [
        (0, "Stopping: no request is open. Ctrl-C again stops at once."),
        (1, "Stopping: 1 open request has 30 s to finish. Ctrl-C again cuts it at once."),
        (7, "Stopping: 7 open requests have 30 s to finish. Ctrl-C again cuts them at once."),
        (None, "Stopping: open requests have 30 s to finish. Ctrl-C again cuts them at once."),
    ],
)
def test_the_line(num_open: int | None, line: str) -> None:
    assert drain_notice(num_open, 30.0) == line
