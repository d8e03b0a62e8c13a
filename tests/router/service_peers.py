"""A scripted worker behind a real stream: dials the router, registers, beats, serves."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from bench.support.worker_link import WorkerLink
from cluster.ids import WorkerId
from cluster.wire.kv_events import RouterSays
from cluster.wire.messages import Register, Role, WorkerState
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


class LiveWorker(WorkerLink):
    """One worker process, as far as a router can tell. `steps` False: the engine hangs."""

    def __init__(
        self, host: Host, register: Register, *, state: WorkerState = WorkerState.READY, steps: bool = True
    ) -> None:
        self.host = host
        self.peer = ScriptedPrefill(register) if register.role is Role.PREFILL else ScriptedDecode(register)
        super().__init__(host.address, TOKEN, register, self._receive, self.peer.load, state)
        self.steps = steps
        self.wake = asyncio.Event()
        self.received: deque[RouterSays] = deque(maxlen=100)

    async def start(self) -> None:
        self.host.started.append(self)
        self.host.workers[self.register.worker] = self
        await super().start()
        if self.welcomed.is_set():
            self.run(self._work())

    def set_state(self, state: WorkerState) -> None:
        self.state = state
        self.beat()

    async def kill(self) -> None:
        if self.host.workers.get(self.register.worker) is self:
            del self.host.workers[self.register.worker]
        await super().kill()

    def _receive(self, message: RouterSays) -> None:
        self.received.append(message)
        self.peer.receive(message, asyncio.get_running_loop().time())
        self.wake.set()

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
