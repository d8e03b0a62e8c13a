"""Connections of one client process: opened when a request needs one, kept alive, used again when idle.

1. A request takes the connection that became idle last; with none idle, a new one is opened. Opening is
   part of the request's latency.
2. What a socket read brings is stamped at once and put into the inbox; it is parsed after all sockets that
   are ready have been read, so that parsing one answer does not date the next.
3. The inbox is emptied a bounded number of reads at a time: a due request does not wait for a flood.
4. After the message's end a connection is idle; one that the server closes, or that is idle for longer than
   `MAX_IDLE_S`, is let go.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

MAX_READS_PER_TURN = 2  # what comes meanwhile is stamped that late: some 40 us each
MAX_IDLE_S = 4.0  # servers commonly close after 5
NS = 1_000_000_000

Address = tuple[socket.AddressFamily, tuple[object, ...]]
ReadHandler = Callable[["Connection", bytes | None, int, Exception | None], None]


class Inbox:
    """Reads that wait to be parsed: (connection, bytes or None for its end, moment, error of its end)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: ReadHandler) -> None:
        self._loop = loop
        self._handle = handle
        self._reads: deque[tuple[Connection, bytes | None, int, Exception | None]] = deque()
        self._is_scheduled = False

    def put(
        self, connection: Connection, data: bytes | None, moment_ns: int, error: Exception | None
    ) -> None:
        self._reads.append((connection, data, moment_ns, error))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._empty)

    def _empty(self) -> None:
        reads = self._reads
        for _ in range(min(len(reads), MAX_READS_PER_TURN)):
            self._handle(*reads.popleft())
        if reads:
            self._loop.call_soon(self._empty)
        else:
            self._is_scheduled = False


class Connection(asyncio.Protocol):
    """One connection: stamps what it reads and says when what it sent is with the kernel."""

    def __init__(self, inbox: Inbox) -> None:
        self.is_closed = False
        self.idle_since_ns = 0
        self._inbox = inbox
        self._transport: asyncio.Transport | None = None
        self._on_sent: Callable[[int], None] | None = None

    def send(self, payload: bytes, on_sent: Callable[[int], None]) -> None:
        """`on_sent(moment_ns)` is called when the last byte was handed to the kernel (with TLS: to its
        record layer), at once if the kernel takes all of it."""
        transport = self._transport
        assert transport is not None
        transport.write(payload)
        if transport.get_write_buffer_size() == 0:
            on_sent(time.perf_counter_ns())
        else:
            self._on_sent = on_sent

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # resume_writing then means: all is written
        if self.is_closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        moment_ns = time.perf_counter_ns()
        self._inbox.put(self, data, moment_ns, None)

    def connection_lost(self, exc: Exception | None) -> None:
        moment_ns = time.perf_counter_ns()
        self.is_closed = True
        self._inbox.put(self, None, moment_ns, exc)

    def resume_writing(self) -> None:
        on_sent, self._on_sent = self._on_sent, None
        if on_sent is not None:
            on_sent(time.perf_counter_ns())


class Dialled(NamedTuple):
    sock: socket.socket  # connecting to `addresses[0]`
    addresses: tuple[Address, ...]  # to try, in this order
    is_connected: bool


class Connections:
    """Opens connections to one server and keeps the idle ones."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, host: str, port: int, context: ssl.SSLContext | None
    ) -> None:
        self._loop = loop
        self._host = host
        self._port = port
        self.context = context
        self._addresses: tuple[Address, ...] = ()
        self._idle: list[Connection] = []

    async def resolve(self) -> None:
        """Look the host up, once, before the run.

        Raises:
            OSError: the name is not known.
        """
        found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        self._addresses = tuple((family, address) for family, _, _, _, address in found)

    def take_idle(self, now_ns: int) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue
            if now_ns - connection.idle_since_ns < MAX_IDLE_S * NS:
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection, now_ns: int) -> None:
        connection.idle_since_ns = now_ns
        self._idle.append(connection)

    def close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def dial(self) -> Dialled:
        """Begin to connect to the address that accepted last.

        On one machine a TCP connection stands within the system call, so the request can go out at once,
        without waiting for turns of the event loop. One that is refused is not connected; `open` finds out
        why.

        Raises:
            OSError: no more sockets may be opened.
        """
        addresses = self._addresses
        family, address = addresses[0]
        sock = new_socket(family)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            code = sock.connect_ex(address)
        return Dialled(sock, addresses, code in (0, errno.EISCONN))

    async def open(self, connection: Connection, dialled: Dialled) -> None:
        """Connect to the first address that accepts, beginning with what `dial` began.

        Raises:
            OSError: no address accepts, or the TLS handshake failed.
        """
        failure: OSError | None = None
        for position, (family, address) in enumerate(dialled.addresses):
            sock = dialled.sock if position == 0 else new_socket(family)
            try:
                if position > 0 or not dialled.is_connected:
                    await self._loop.sock_connect(sock, address)
                await self.attach(connection, sock)
            except OSError as error:
                sock.close()
                failure = error
            except asyncio.CancelledError:
                sock.close()  # `dial`'s own is closed once more by who cancelled; that does no harm
                raise
            else:
                last = dialled.addresses[position]
                self._addresses = (last, *(other for other in self._addresses if other != last))
                return
        assert failure is not None
        raise failure

    async def attach(self, connection: Connection, sock: socket.socket) -> None:
        """Let the event loop read a connected socket; reads may come before this returns."""
        await self._loop.create_connection(
            lambda: connection,
            sock=sock,
            ssl=self.context,
            server_hostname=self._host if self.context is not None else None,
        )


def new_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
