"""Dial and accept: the asyncio driver of the handshake. What comes out are `Stream`s.

1. `connect` dials, or a `Listener` accepts.
2. Both run the handshake within a deadline; not a byte of a message is read before it is done. When too many
   are pending, a newcomer takes the place of the oldest: who only holds connections open keeps nobody out.
3. The dialler gets its `Stream`; the listener runs `on_stream` for each, in a task of its own, and closes the
   stream when that returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from cluster.errors import AuthenticationError, WireError
from cluster.wire.address import TcpAddress, UnixAddress, parse_address
from cluster.wire.codec import MAX_FRAME_BYTES
from cluster.wire.connection import MAX_PENDING_BYTES, Stream, peer_pid
from cluster.wire.handshake import FRAME_BYTES, DiallerHandshake, Handshake, ListenerHandshake
from cluster.wire.line import Line

logger = logging.getLogger(__name__)

__all__ = ["Listener", "Stream", "connect", "listen"]

HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_PENDING_HANDSHAKES: Final = 64


async def connect(
    address: str,
    token: bytes,
    decode_type: Any,
    *,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    max_pending_bytes: int = MAX_PENDING_BYTES,
) -> Stream[Any]:
    """Dial and authenticate. `decode_type` is the union of messages the other end may send.

    Raises:
        AuthenticationError: the other end does not know the token, or says that we do not.
        ProtocolError: it speaks another version or another protocol.
        WireError: nobody listens there, or no answer within `timeout_s`.
    """
    target = parse_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            if isinstance(target, UnixAddress):
                _, line = await loop.create_unix_connection(Line, target.path)
            else:
                _, line = await loop.create_connection(Line, target.host, target.port)
            _set_nodelay(line)
            try:
                await _shake_hands(DiallerHandshake(token), line)
            except BaseException:
                line.transport.abort()
                raise
    except TimeoutError as error:
        raise WireError(f"no answer from {address} within {timeout_s:g} s") from error
    except OSError as error:
        raise WireError(f"cannot connect to {address}: {error.strerror or error}") from error
    return Stream(
        line,
        decode_type,
        peer=address,
        max_frame_bytes=max_frame_bytes,
        max_pending_bytes=max_pending_bytes,
    )


class Listener:
    """Accepts streams until closed; made by `listen`. Each stream's handler is a task it owns."""

    def __init__(
        self,
        token: bytes,
        decode_type: Any,
        on_stream: Callable[[Stream[Any]], Awaitable[None]],
        *,
        handshake_timeout_s: float,
        max_frame_bytes: int,
        max_pending_bytes: int,
    ) -> None:
        self._token = token
        self._decode_type = decode_type
        self._on_stream = on_stream
        self._handshake_timeout_s = handshake_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._max_pending_bytes = max_pending_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[Line, None] = {}  # pending, oldest first
        self._server: asyncio.Server | None = None
        self._socket_file: tuple[str, int] | None = None  # path and inode of the unix socket we made
        self.address = ""  # where to dial: the real port when port 0 was asked

    async def start(self, address: str) -> None:
        target = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            if isinstance(target, UnixAddress):
                self._server = await loop.create_unix_server(self._make_line, target.path)
                os.chmod(target.path, 0o600)
                self._socket_file = (target.path, os.stat(target.path).st_ino)
                self.address = address
            else:
                self._server = await loop.create_server(self._make_line, target.host, target.port)
                port = self._server.sockets[0].getsockname()[1]
                self.address = str(TcpAddress(target.host, port))
        except OSError as error:
            raise WireError(f"cannot listen on {address}: {error.strerror or error}") from error

    async def close(self) -> None:
        """Stop accepting, cancel the handlers of open streams, remove the socket file. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket_file is not None:
            path, inode = self._socket_file
            self._socket_file = None
            if os.path.exists(path) and os.stat(path).st_ino == inode:
                os.unlink(path)

    def _make_line(self) -> Line:
        return Line(self._on_made)

    def _on_made(self, line: Line) -> None:
        task = asyncio.get_running_loop().create_task(self._accept(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, line: Line) -> None:
        try:
            peer = _peer_name(line)  # while the socket is there to ask
            if not await self._authenticate(line, peer):
                return
            stream: Stream[Any] = Stream(
                line,
                self._decode_type,
                peer=peer,
                max_frame_bytes=self._max_frame_bytes,
                max_pending_bytes=self._max_pending_bytes,
            )
            try:
                await self._on_stream(stream)
            except WireError as error:
                logger.warning("stream from %s closed: %s", stream.peer, error)
            finally:
                await stream.close()
        except asyncio.CancelledError:
            if self._server is not None:  # only `close` may cancel a handler quietly
                raise
        finally:
            line.transport.abort()

    async def _authenticate(self, line: Line, peer: str) -> bool:
        if len(self._handshakes) >= MAX_PENDING_HANDSHAKES:
            logger.warning("%d handshakes are pending: the oldest makes room", len(self._handshakes))
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.transport.abort()
        self._handshakes[line] = None
        try:
            _set_nodelay(line)
            async with asyncio.timeout(self._handshake_timeout_s):
                await _shake_hands(ListenerHandshake(self._token), line)
        except TimeoutError:
            logger.warning(
                "connection from %s closed: no handshake within %g s", peer, self._handshake_timeout_s
            )
        except (WireError, OSError) as error:
            logger.warning("connection from %s closed: %s", peer, error)
        else:
            return True
        finally:
            self._handshakes.pop(line, None)  # gone if it made room
        return False


async def listen(
    address: str,
    token: bytes,
    decode_type: Any,
    on_stream: Callable[[Stream[Any]], Awaitable[None]],
    *,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    max_pending_bytes: int = MAX_PENDING_BYTES,
) -> Listener:
    """Accept streams at `address` (port 0: any free one; see `Listener.address`).

    `on_stream` runs once per authenticated stream, which is closed when it returns or raises.

    Raises:
        WireError: the address cannot be bound.
    """
    listener = Listener(
        token,
        decode_type,
        on_stream,
        handshake_timeout_s=handshake_timeout_s,
        max_frame_bytes=max_frame_bytes,
        max_pending_bytes=max_pending_bytes,
    )
    await listener.start(address)
    return listener


async def _shake_hands(handshake: Handshake, line: Line) -> None:
    """Drive a handshake to its end; the caller holds the deadline."""
    line.transport.write(handshake.start())
    while not handshake.is_done:
        try:
            frame = await line.read_exactly(FRAME_BYTES)
        except EOFError as error:
            raise AuthenticationError(
                "the peer closed the connection during the handshake (another cluster token?)"
            ) from error
        line.transport.write(handshake.receive(frame))
        await line.drain()
        if handshake.error is not None:
            raise handshake.error


def _set_nodelay(line: Line) -> None:
    sock = line.transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _peer_name(line: Line) -> str:
    pid = peer_pid(line.transport)
    if pid is not None:
        return f"pid {pid}"
    host, port, *_ = line.transport.get_extra_info("peername") or ("?", 0)
    return str(TcpAddress(host, port))
