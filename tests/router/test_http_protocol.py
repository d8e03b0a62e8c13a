"""An answer that is written waits for its reader, but not for ever."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.asgi import Receive, Scope, Send, send_bytes
from router.generation import InFlight
from router.http_protocol import HttpProtocol
from router.server import serve_http

LARGE = 16 * 2**20  # more than systems keep for a connection
WAIT_S = 20.0


async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
    await send_bytes(send, 200, [], b"x" * LARGE)


@contextmanager
def serving(stalled_s: float) -> Iterator[int]:
    """The port."""
    started: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_listening = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()

        def on_listening(_: str, port: int) -> None:
            started.append((port, asyncio.get_running_loop(), stop))
            is_listening.set()

        await serve_http(
            answer_at_length,
            InFlight(),
            "127.0.0.1",
            0,
            stop=stop,
            stalled_s=stalled_s,
            on_listening=on_listening,
        )

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert is_listening.wait(WAIT_S)
    port, loop, stop = started[0]
    yield port
    loop.call_soon_threadsafe(stop.set)
    thread.join(WAIT_S)
    assert not thread.is_alive()


@contextmanager
def asking(port: int, line: bytes = b"") -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
        yield connection


@pytest.mark.parametrize("line", [b"", b"Connection: close\r\n"])
def test_an_answer_that_nobody_takes_is_dropped(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    was_dropped = threading.Event()
    connection_lost = HttpProtocol.connection_lost

    def lost(self: HttpProtocol, exc: Exception | None) -> None:
        connection_lost(self, exc)
        if self.server == ("127.0.0.1", port):  # another server's connection may end late in this process
            was_dropped.set()

    monkeypatch.setattr(HttpProtocol, "connection_lost", lost)
    with serving(stalled_s=0.3) as port, asking(port, line) as connection:
        assert was_dropped.wait(WAIT_S)
        num_bytes = sum(map(len, iter(lambda: connection.recv(2**20), b"")))
    assert num_bytes < LARGE


def test_one_that_is_taken_slowly_arrives_whole() -> None:
    with serving(stalled_s=3.0) as port, asking(port, b"Connection: close\r\n") as connection:
        num_bytes = 0
        for _ in range(10):
            time.sleep(0.35)  # longer than `stalled_s` in all
            wanted = num_bytes + LARGE // 12
            while num_bytes < wanted:
                num_bytes += len(connection.recv(2**20))
        num_bytes += sum(map(len, iter(lambda: connection.recv(2**20), b"")))
    assert num_bytes > LARGE
