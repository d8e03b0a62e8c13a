"""The bytes of one connection, before anybody knows what they mean: what the handshake and `Stream` stand on.

1. Bytes that come are kept until somebody reads them; who keeps too many unread stops the other end.
2. With `push_to` they are handed over within the event that brought them instead: no task has to wake up for
   them, and nothing is kept.
3. The end (the peer closed, or the connection is lost) comes after all bytes, once and for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

MAX_UNREAD_BYTES: Final = 128 << 10

TakeBytes = Callable[[bytes], None]  # b"": nothing more comes


class Line(asyncio.Protocol):
    """One connection, either end. Belongs to its event loop; one task reads."""

    transport: asyncio.Transport

    def __init__(self, on_made: Callable[[Line], None] | None = None) -> None:
        """`on_made` is called when the connection is there."""
        self._on_made = on_made
        self._unread = bytearray()
        self._is_held_back = False  # the other end, until what is unread has been read
        self._has_ended = False
        self._broke_by: Exception | None = None
        self._take: TakeBytes | None = None
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()  # to write more, or nobody ever will
        self._room.set()
        self._lost = asyncio.Event()

    # ---- for who owns the connection

    async def read(self) -> bytes:
        """What has come, as soon as anything has; b"" at the end. Cancelling it loses nothing."""
        while not self._unread and not self._has_ended:
            await self._wait()
        return self._taken(len(self._unread))

    async def read_exactly(self, num_bytes: int) -> bytes:
        """
        Raises:
            EOFError: the peer closed before.
            OSError: the connection broke before.
        """
        while len(self._unread) < num_bytes:
            if self._has_ended:
                raise self._broke_by or EOFError
            await self._wait()
        return self._taken(num_bytes)

    def push_to(self, take: TakeBytes | None) -> None:
        """From now on `take` gets all bytes, first those that are unread, then b"" (perhaps more than once);
        None: they are kept again."""
        self._take = take
        if take is None:
            return
        if self._unread:
            take(self._taken(len(self._unread)))
        if self._has_ended:
            take(b"")

    async def drain(self) -> None:
        """Wait until the system has taken enough of what was written.

        Raises:
            OSError: the connection is lost.
        """
        if self.transport.is_closing():
            await asyncio.sleep(0)  # a write has just failed: the loss is told in the loop's next turn
        await self._room.wait()
        if self._lost.is_set():
            raise self._broke_by or ConnectionResetError("the connection is lost")

    async def wait_lost(self) -> None:
        """Until the connection is closed, and what was written has left or never will."""
        await self._lost.wait()

    # ---- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._take is not None:
            self._take(data)
            return
        self._unread += data
        if len(self._unread) > MAX_UNREAD_BYTES and not self._is_held_back:
            self._is_held_back = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._end()
        return True  # who owns the connection closes it

    def connection_lost(self, exc: Exception | None) -> None:
        self._broke_by = exc
        self._lost.set()
        self._room.set()
        self._end()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    # ---- small parts

    def _end(self) -> None:
        self._has_ended = True
        if self._take is not None:
            self._take(b"")
        self._wake()

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _taken(self, num_bytes: int) -> bytes:
        data = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        if self._is_held_back:
            self._is_held_back = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return data
