"""One authenticated connection as a stream of typed messages: what `connect` and `listen` hand out.

1. `post` sends a message without waiting, at once if the system takes it; `send` also waits for room. What
   the system has not taken is bounded: a peer that does not read loses the stream.
2. Iterating yields messages; `pump` hands them over within the event that brought them, which costs no turn
   of the loop. Both end when the peer closed or died, and raise `WireError` when the stream had to be given
   up: garbage, a frame cut short, overflow.
3. `close` writes out what is queued, within a deadline.

The end of the messages is the one place where a stream's death is learned: posts to a dead stream are
dropped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from cluster.errors import ProtocolError, WireError
from cluster.wire.codec import MAX_FRAME_BYTES, PREFIX_BYTES, FrameDecoder, encode
from cluster.wire.line import Line

MAX_PENDING_BYTES: Final = 32 << 20
SEND_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 2.0

M = TypeVar("M")


class Kept(Protocol):
    """What holds a descriptor of its own of a connection that was handed over."""

    def close(self) -> None: ...


K = TypeVar("K", bound=Kept)


class Stream(Generic[M]):
    """One authenticated connection; made by `connect` and `listen` only.

    Belongs to the event loop it was made in. One consumer iterates or pumps; anyone on the loop may post.
    """

    def __init__(
        self,
        line: Line,
        decode_type: Any,
        *,
        peer: str,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self.peer = peer  # the other end's address, for messages to people
        self.peer_pid = peer_pid(line.transport)  # unix sockets on Linux only
        self._line = line
        self._transport = line.transport
        self._decoder: FrameDecoder[M] = FrameDecoder(decode_type, max_frame_bytes)
        self._max_frame_bytes = max_frame_bytes
        self._max_pending_bytes = max_pending_bytes
        self._incoming: Iterator[M] = iter(())  # messages of the last read, decoded as they are taken
        self._error: WireError | None = None  # why this side gave the stream up
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed or self._transport.is_closing()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes posted that the system has not taken yet."""
        return self._transport.get_write_buffer_size()

    def post(self, message: msgspec.Struct) -> None:
        """Queue `message`; never waits. Dropped when the stream is closed.

        More than `max_pending_bytes` unsent closes the stream, and the iteration raises.

        Raises:
            ProtocolError: the message is longer than a frame may be; the stream lives on.
        """
        if self._is_closed or self._transport.is_closing():
            return
        frame = encode(message)
        if len(frame) - PREFIX_BYTES > self._max_frame_bytes:
            raise ProtocolError(
                f"{type(message).__name__} of {len(frame) - PREFIX_BYTES} bytes is over the frame limit of "
                f"{self._max_frame_bytes}"
            )
        num_pending_bytes = self._transport.get_write_buffer_size()
        if num_pending_bytes + len(frame) > self._max_pending_bytes:
            limit = self._max_pending_bytes
            self._give_up(
                WireError(f"{self.peer} does not read: {num_pending_bytes} bytes wait, the limit is {limit}")
            )
            return
        self._transport.write(frame)

    async def send(self, message: msgspec.Struct, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Queue `message` and wait until the peer leaves room for more.

        Raises:
            WireError: the stream is closed, or there was no room within `timeout_s` (which closes it).
        """
        if self.is_closed:
            raise self._error or WireError(f"stream to {self.peer} is closed")
        self.post(message)
        try:
            async with asyncio.timeout(timeout_s):
                await self._line.drain()
        except TimeoutError:
            self._give_up(WireError(f"{self.peer} did not read for {timeout_s:g} s"))
        except OSError as error:
            raise WireError(f"stream to {self.peer} broke: {error}") from error
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> Stream[M]:
        return self

    async def __anext__(self) -> M:
        """The next message. Cancelling the wait loses nothing, so a first message may be awaited with a
        deadline and the rest iterated."""
        while True:
            try:
                for message in self._incoming:
                    return message
            except ProtocolError as error:
                raise self._give_up(error) from error
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            data = await self._line.read()
            if not data:
                self._end()
                raise StopAsyncIteration
            self._incoming = self._decoder.feed(data)

    async def pump(self, take: Callable[[M], bool]) -> None:
        """Hand each message to `take` the moment it is read, until the stream ends or `take` says False.

        Raises:
            WireError: as iterating does.
            Exception: what `take` raised; if it is a `ProtocolError`, the stream is given up.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def read(data: bytes) -> None:
            if over.done():  # the pump has yet to wake up and end: these are for who reads on
                self._line.push_to(None)
                self._line.data_received(data)
                return
            try:
                self._incoming = self._decoder.feed(data)
                goes_on = all(take(message) for message in self._incoming)
                if goes_on and data:
                    return
                if goes_on:
                    self._end()
                over.set_result(None)
            except ProtocolError as error:
                over.set_exception(self._give_up(error))
            except Exception as error:  # of who takes; raised where the pump is awaited
                over.set_exception(error)

        try:
            if not all(take(message) for message in self._incoming):
                return
        except ProtocolError as error:
            raise self._give_up(error) from error
        self._line.push_to(read)
        try:
            await over
        finally:
            self._line.push_to(None)

    async def close(self) -> None:
        """Write out what was posted, within two seconds, and close. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._line.wait_lost()
        except TimeoutError:  # the peer takes no more: what it did not read is lost with it
            self._transport.abort()

    async def hand_over(self, last: msgspec.Struct, keep: Callable[[int], K | None]) -> K | None:
        """Let `keep` have a file descriptor of the connection, which goes on; this object is closed. `last`
        is said only once the descriptor is kept. What `keep` returns; None: it does not want it, and the
        connection ends with nothing said.

        Raises:
            WireError: the stream is closed, or the peer does not read; what was kept is closed.
        """
        if self.is_closed:
            raise self._error or WireError(f"stream to {self.peer} is closed")
        try:
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
            kept = keep(descriptor)
            if kept is None:
                os.close(descriptor)
                return None
            try:
                await self._say_last(last)
            except BaseException:
                kept.close()
                raise
            return kept
        except TimeoutError as error:
            raise WireError(f"{self.peer} did not read for {CLOSE_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise WireError(f"stream to {self.peer} broke: {error}") from error
        finally:
            self.abort()

    async def _say_last(self, last: msgspec.Struct) -> None:
        self._transport.set_write_buffer_limits(0)  # a drain waits for the last byte
        self.post(last)
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await self._line.drain()

    def abort(self) -> None:
        """Close at once; what was posted and not sent is lost."""
        self._is_closed = True
        self._transport.abort()

    def _end(self) -> None:
        """Nothing more will come: raises unless the peer just closed at the end of a frame."""
        if self._error is not None:
            raise self._error
        if not self._is_closed:
            try:
                self._decoder.finish()
            except ProtocolError as error:
                raise self._give_up(error) from error
        self.abort()

    def _give_up(self, error: WireError) -> WireError:
        """Cut the connection; the iteration raises `error`."""
        if self._error is None:
            self._error = error
        self._transport.abort()
        return self._error


def peer_pid(transport: asyncio.BaseTransport) -> int | None:
    """The process at the other end of a unix socket, as the kernel knows it; None where it cannot say."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, _uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(pid)
