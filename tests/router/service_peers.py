"""A scripted worker behind a real stream: dials the router, registers, beats, serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from cluster.ids import WorkerId
from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.messages import (
    Heartbeat,
    Refused,
    Register,
    Role,
    Welcome,
    WorkerState,
)
from cluster.wire.stream import Stream, connect
from tests.router.conductor_peers import Commit, ScriptedDecode, ScriptedPrefill

TOKEN = b"a-cluster-token-for-tests"


class Host:
    """Where the workers of one test live; carries KV commits between them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.workers: dict[WorkerId, LiveWorker] = {}  # those that run
        self.started: list[LiveWorker] = []

    async def start(self, register: Register, **settings: Any) -> LiveWorker:
        worker = LiveWorker(self, register, **settings)
        await worker.start()
        return worker

    def commit(self, decode: WorkerId, commit: Commit) -> bool:
        worker = self.workers.get(decode)
        if worker is None or not isinstance(worker.peer, ScriptedDecode):
            return False
        done = worker.peer.commit(commit)
        worker.wake.set()
        return done

    async def close(self) -> None:
        for worker in self.started:
            await worker.kill()


class LiveWorker:
    """One worker process, as far as a router can tell. `steps` False: the engine hangs."""

    def __init__(
        self, host: Host, register: Register, *, state: WorkerState = WorkerState.READY, steps: bool = True
    ) -> None:
        self.host = host
        self.peer = ScriptedPrefill(register) if register.role is Role.PREFILL else ScriptedDecode(register)
        self.state = state
        self.steps = steps
        self.beats = True
        self.wake = asyncio.Event()
        self.refused: str | None = None
        self.welcomed = asyncio.Event()
        self.gone = asyncio.Event()
        self.received: deque[RouterSays] = deque(maxlen=100)
        self._tasks: list[asyncio.Task[None]] = []
        self._stream: Stream[RouterSays] | None = None
        self._interval_s = 0.0

    async def start(self) -> None:
        self.host.started.append(self)
        self._stream = await connect(self.host.address, TOKEN, RouterSays)
        self._stream.post(self.peer.register)
        self.host.workers[self.peer.register.worker] = self
        self._tasks.append(asyncio.create_task(self._read()))
        await asyncio.wait_for(self._answered(), 5.0)

    async def _answered(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self.welcomed, self.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def post(self, message: WorkerSays) -> None:
        assert self._stream is not None
        self._stream.post(message)

    def beat(self) -> None:
        self.post(Heartbeat(state=self.state, load=self.peer.load()))

    def set_state(self, state: WorkerState) -> None:
        self.state = state
        self.beat()

    async def kill(self) -> None:
        """SIGKILL: nothing more comes, the stream breaks."""
        if self.host.workers.get(self.peer.register.worker) is self:
            del self.host.workers[self.peer.register.worker]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            self._stream.abort()
            await asyncio.sleep(0)  # the transport closes in the next turn of the loop

    def hang(self) -> None:
        """SIGSTOP: the stream stays open and silent."""
        for task in self._tasks:
            task.cancel()

    async def _read(self) -> None:
        assert self._stream is not None
        with contextlib.suppress(asyncio.CancelledError):
            async for message in self._stream:
                self.received.append(message)
                match message:
                    case Welcome(heartbeat_interval_s=interval_s):
                        self._interval_s = interval_s
                        self.beat()
                        self._tasks.append(asyncio.create_task(self._beat_on()))
                        self._tasks.append(asyncio.create_task(self._work()))
                        self.welcomed.set()
                    case Refused(reason=reason):
                        self.refused = reason
                    case _:
                        self.peer.receive(message, asyncio.get_running_loop().time())
                        self.wake.set()
            self.gone.set()

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)  # the interval is what is under test
            if self.beats:
                self.beat()

    async def _work(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._flush()
            while self.steps and self.peer.num_held > 0:
                before = len(self.peer.out)
                self.peer.step(asyncio.get_running_loop().time())
                if isinstance(self.peer, ScriptedPrefill):
                    self._ship(self.peer)
                if len(self.peer.out) == before:
                    break  # nothing to compute until something comes
                self._flush()
                await asyncio.sleep(0)

    def _flush(self) -> None:
        while self.peer.out:
            self.post(self.peer.out.popleft())

    def _ship(self, prefill: ScriptedPrefill) -> None:
        while prefill.to_decode:
            decode, _, commit = prefill.to_decode.popleft()
            if prefill.committing.pop(commit.key, None) is not None:
                self.host.commit(decode, commit)
