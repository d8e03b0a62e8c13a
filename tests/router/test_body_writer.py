"""What the server offers beside ASGI: a part of a body is with the kernel when `write` returns."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import uvloop

from router.asgi import BODY_WRITER, BodyWriter, Receive, Scope, Send
from router.generation import InFlight
from router.server import serve_http

WAIT_S = 20.0


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_part_leaves_while_the_loop_is_held_up(loop_factory: object) -> None:
    """The event loop stands still until the client has what was written: it cannot have sent it later."""
    has_read = threading.Event()
    was_read_at_once: list[bool] = []
    port: asyncio.Queue[int] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        body: BodyWriter = scope[BODY_WRITER]
        assert body.write(b"two")
        was_read_at_once.append(has_read.wait(WAIT_S))
        await send({"type": "http.response.body", "body": b"three", "more_body": False})

    def read(number: int) -> bytes:
        data = b""
        with socket.create_connection(("127.0.0.1", number), WAIT_S) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            while part := connection.recv(65_536):
                data += part
                if b"two" in data:
                    has_read.set()
        return data

    async def serve() -> bytes:
        stop = asyncio.Event()
        serving = asyncio.create_task(
            serve_http(
                app,
                InFlight(),
                "127.0.0.1",
                0,
                stop=stop,
                on_listening=lambda _, number: port.put_nowait(number),
            )
        )
        data = await asyncio.to_thread(read, await port.get())
        stop.set()
        assert await serving
        return data

    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        data = runner.run(serve())
    assert data.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
    assert was_read_at_once == [True]
