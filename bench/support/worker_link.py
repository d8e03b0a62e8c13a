"""The stream of a scripted worker to a real router: it dials, registers, beats; the rest is its owner's.

1. `start` dials, sends `Register` and returns once the router has answered it.
2. Welcomed, it sends a heartbeat at once and then one per interval; every other message goes to the owner.
3. `gone` is set when the stream has ended. `kill` and `hang` are the deaths of a process: its stream breaks,
   or stays open and silent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.messages import Heartbeat, Refused, Register, Welcome, WorkerLoad, WorkerState
from cluster.wire.stream import Stream, connect

ANSWER_TIMEOUT_S = 5.0


class WorkerLink:
    """One worker's side of its control stream. `load` is asked at each beat; `beats` False: none is sent."""

    def __init__(
        self,
        address: str,
        token: bytes,
        register: Register,
        on_message: Callable[[RouterSays], None],
        load: Callable[[], WorkerLoad],
        state: WorkerState = WorkerState.READY,
    ) -> None:
        self.register = register
        self.state = state
        self.beats = True
        self.refused: str | None = None
        self.link = 0  # as the router numbered it
        self.welcomed = asyncio.Event()
        self.gone = asyncio.Event()
        self._address = address
        self._token = token
        self._on_message = on_message
        self._load = load
        self._stream: Stream[RouterSays] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """
        Raises:
            WireError: nobody listens there, or the token is not known.
            TimeoutError: the router does not answer.
        """
        self._stream = await connect(self._address, self._token, RouterSays)
        self._stream.post(self.register)
        self.run(self._read(self._stream))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            waits = [asyncio.create_task(event.wait()) for event in (self.welcomed, self.gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def post(self, message: WorkerSays) -> None:
        assert self._stream is not None
        self._stream.post(message)

    def beat(self) -> None:
        self.post(Heartbeat(state=self.state, load=self._load()))

    def run(self, work: Coroutine[None, None, None]) -> None:
        """A task that ends with the process."""
        self._tasks.append(asyncio.create_task(work))

    async def kill(self) -> None:
        """SIGKILL: nothing more comes, the stream breaks."""
        self.hang()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            self._stream.abort()
            await asyncio.sleep(0)  # the transport closes in the next turn of the loop

    def hang(self) -> None:
        """SIGSTOP: the stream stays open and silent."""
        for task in self._tasks:
            task.cancel()

    async def _read(self, stream: Stream[RouterSays]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for message in stream:
                if isinstance(message, Welcome):
                    self.link = message.link
                    self.beat()
                    self.run(self._beat_on(message.heartbeat_interval_s))
                    self.welcomed.set()
                elif isinstance(message, Refused):
                    self.refused = message.reason
                else:
                    self._on_message(message)
            self.gone.set()

    async def _beat_on(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)  # the interval itself
            if self.beats:
                self.beat()
