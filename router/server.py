"""The HTTP server of a router: bind, serve, stop within a deadline. With `router.http_protocol`
the owner of uvicorn.

1. The port is bound before anything else starts, so "in use" is one clear sentence. Where routers share it,
   each listens once it can serve.
2. uvicorn serves the app until `stop` is set; signals are the launcher's business, not uvicorn's.
3. Stopping: new requests get 503 at once, or go to the routers that share the port; open ones may finish
   within the grace time, then end with an error (an error event and `[DONE]` where a stream is open); then
   connections close.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from cluster.errors import ConfigError
from router.address import BACKLOG, bind, cannot_listen
from router.asgi import Receive, Scope, Send
from router.generation import InFlight
from router.http_protocol import HttpProtocol
from router.public_side import on_its_side

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_END_WITHIN_S = 2.0  # for open streams to write their error event
_CLOSE_WITHIN_S = 2  # for connections to close after that


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._has_started.set()

    async def join_port(self, listener: socket.socket, when: asyncio.Event) -> None:
        """Listen at a shared address: connections come here too from then on.

        Raises:
            ConfigError: somebody who does not share it was first.
        """
        await when.wait()
        await self._has_started.wait()
        config = self.config

        def make_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(make_protocol, sock=listener, backlog=BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise cannot_listen(host, port, error) from error
        self.servers.insert(0, server)

    def leave_port(self) -> None:
        """Take no more connections at the first address, and no more requests on those that are open: clients
        come again and reach the routers that share it. What runs goes on."""
        self.servers[0].close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: Application,
    in_flight: InFlight,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    grace_s: float = 30.0,
    max_header_bytes: int = HttpProtocol.max_head_bytes,
    arrival_s: float = HttpProtocol.arrival_s,
    stalled_s: float = HttpProtocol.stalled_s,
    shares_port_when: asyncio.Event | None = None,
    on_listening: Callable[[str, int], None] | None = None,
    admin: tuple[str, int] | None = None,
    on_admin_listening: Callable[[str, int], None] | None = None,
) -> bool:
    """Serve until `stop` is set and the open requests (`app.state.in_flight`) are over; whether all of
    them finished by themselves.

    `on_listening` gets the address as bound, before the first request can be read. With `admin`, a second
    (host, port), the private paths (`router.public_side`) are answered there and nowhere else. With
    `shares_port_when` other routers listen at the address too, and this one from that moment on: until it can
    serve, clients are the others'.

    Raises:
        ConfigError: the address cannot be used.
    """
    is_shared = shares_port_when is not None
    listeners = [bind(host, port, is_shared=is_shared)]
    if admin is not None:
        try:
            listeners.append(bind(*admin, flag="--admin-port"))
        except ConfigError:
            listeners[0].close()
            raise
        app = _split(app, listeners[1].getsockname()[1])
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http=type(
            "_LimitedProtocol",
            (HttpProtocol,),
            {"max_head_bytes": max_header_bytes, "arrival_s": arrival_s, "stalled_s": stalled_s},
        ),
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_CLOSE_WITHIN_S,
        backlog=BACKLOG,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=listeners[is_shared:]))
    stopping = asyncio.create_task(stop.wait())
    waits: set[asyncio.Task[Any]] = {serving, stopping}
    has_joined = False
    try:
        if on_admin_listening is not None and len(listeners) > 1:
            on_admin_listening(*listeners[1].getsockname()[:2])
        if shares_port_when is not None:
            joining = asyncio.create_task(server.join_port(listeners[0], shares_port_when))
            await asyncio.wait({*waits, joining}, return_when=asyncio.FIRST_COMPLETED)
            has_joined = joining.done()
            if not joining.cancel():
                joining.result()
        if on_listening is not None:
            on_listening(*listeners[0].getsockname()[:2])
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if has_joined:
            server.leave_port()
        finished = await in_flight.drain(grace_s, _END_WITHIN_S)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
        for listener in listeners:
            listener.close()
    return finished


def _split(app: Application, admin_port: int) -> Application:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await app(on_its_side(scope, admin_port), receive, send)

    return serve
