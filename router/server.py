"""The HTTP server of a router: bind, serve, stop within a deadline. The one owner of uvicorn.

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
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.errors import ConfigError
from router.address import BACKLOG, bind, cannot_listen
from router.asgi import BODY_WRITER, Receive, Scope, Send
from router.generation import InFlight
from router.http_one_zero import without_chunks
from router.openai_errors import error_body, http_error
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


class _BodyWriter:
    """Implements `router.asgi.BodyWriter`: what the cycle's `send` does to a part of a chunked body."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.response_complete or cycle.disconnected:
            return False
        if not cycle.chunked_encoding:  # unknown until the response starts
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _HeadTooLarge(Exception):
    """More bytes of address and headers than a request may have."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's, but an offered upgrade (Java's client offers h2c with every request) is declined as HTTP
    says, by serving the request; uvicorn would drop its body. What is not HTTP gets an error of our shape,
    and so does a head of more than `max_head_bytes`, which uvicorn would keep however large it is, and a
    request that is not whole `arrival_s` after its connection or first byte: uvicorn would wait for it."""

    max_head_bytes = 64 * 2**10
    arrival_s = 60.0
    _arrival: asyncio.TimerHandle | None = None
    _is_arriving = False
    _resuming = False
    _in_head = False
    _began = _had_body = False  # a head, and a part of a body, in the data that is being parsed
    _head_bytes = 0  # of the request whose head is being read: parsed,
    _raw_head_bytes = 0  # and received
    _is_head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_whole()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            self._began = self._had_body = False
            try:
                self.parser.feed_data(data)
                if self._in_head:  # the parser tells of a line when it is complete, and this may have no end
                    self._raw_head_bytes += self._num_head_bytes(data)
                    self._check_head(self._raw_head_bytes)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()
            except (httptools.HttpParserError, _HeadTooLarge):
                self._refuse()
                return

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._expect_request()
            self._in_head = self._began = self._is_arriving = True
            self._head_bytes = self._raw_head_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resuming:
            self._count_head(len(name) + len(value))
            if self._in_head:  # what trails a body is no header: nobody on the way looked at it
                super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._resuming:
            super().on_headers_complete()
            if self.cycle is not None:
                self.scope[BODY_WRITER] = _BodyWriter(self.cycle)  # type: ignore[literal-required]
                if self.scope["http_version"] == "1.0":
                    self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._had_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._request_is_whole()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer(400, b"Bad Request", msg)

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(self.arrival_s, self._too_slow)

    def _request_is_whole(self) -> None:
        self._is_arriving = False
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        self._arrival = None
        is_answered = self.cycle is not None and self.cycle.response_started and not self._in_head
        if self._is_arriving and not is_answered:
            self._answer(408, b"Request Timeout", f"The request did not arrive within {self.arrival_s:g} s.")
        else:  # nothing came, or it was refused while its body was still coming
            self.transport.close()

    def _num_head_bytes(self, data: bytes) -> int:
        """How much of `data` belongs to the head that is not complete yet; where it cannot be told, less."""
        if not self._began:
            return len(data)
        return 0 if self._had_body else len(data) - (data.rfind(b"\r\n\r\n") + 1)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        self._check_head(self._head_bytes)

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > self.max_head_bytes:
            self._is_head_too_large = True
            raise _HeadTooLarge

    def _refuse(self) -> None:
        if self._is_head_too_large:
            limit = self.max_head_bytes
            message = f"The address and headers of a request may have at most {limit} bytes."
            self._answer(431, b"Request Header Fields Too Large", message)
        else:
            self.send_400_response("Invalid HTTP request.")

    def _answer(self, status: int, phrase: bytes, message: str) -> None:
        if self._is_another_first():  # this would be taken for its answer, or a part of it
            self.transport.close()
            return
        body = error_body(http_error(status, message))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: req-%b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, phrase, uuid.uuid4().hex.encode(), len(body), body)
        )
        self.transport.close()

    def _is_another_first(self) -> bool:
        """A request that came before is not answered yet, or the answer to this one has begun."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return bool(self.pipeline)
        return cycle.response_started or self._in_head or not self._is_arriving or bool(self.pipeline)

    def _decline_upgrade(self) -> None:
        """The parser stopped after the headers: a new one takes up the body, with the same framing."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % item for item in self.headers if item[0] in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines))
        self.parser.feed_data(b"\r\n")
        self._resuming = False


async def serve_http(
    app: Application,
    in_flight: InFlight,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    grace_s: float = 30.0,
    max_header_bytes: int = _Protocol.max_head_bytes,
    arrival_s: float = _Protocol.arrival_s,
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
            "_LimitedProtocol", (_Protocol,), {"max_head_bytes": max_header_bytes, "arrival_s": arrival_s}
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
