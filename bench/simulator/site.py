"""What all processes of one run share: time, network, the model's truth, who is where, and the log."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.simulator.events import EventQueue
from bench.simulator.model import Oracle
from bench.simulator.network import Network
from bench.simulator.scenario import Scenario
from bench.simulator.shared_limits import Redis
from cluster.ids import RequestId, WorkerId

if TYPE_CHECKING:
    from bench.simulator.router_process import RouterProcess
    from bench.simulator.worker_process import WorkerProcess


class Log:
    """Everything that happens, in order. Always hashed, so equal hashes are equal runs; printed on demand."""

    def __init__(self, queue: EventQueue, write: Callable[[str], None] | None) -> None:
        self._queue = queue
        self._write = write
        self._codes: dict[object, int] = {}  # of names; Python's own hash of one differs between processes
        self.digest = 0

    def note(self, who: object, what: str, detail: Any = None) -> None:
        """`detail` is not part of the hash."""
        codes = self._codes
        try:
            who_code, what_code = codes[who], codes[what]
        except KeyError:
            who_code, what_code = self._code(who), self._code(what)
        self.digest = hash((self.digest, self._queue.now, who_code, what_code))
        if self._write is not None:
            line = f"{self._queue.now:.7f} {who} {what}"
            self._write(line if detail is None else f"{line}: {detail}")

    def _code(self, name: object) -> int:
        code = self._codes[name] = zlib.crc32(str(name).encode())
        return code


class Site:
    """One run's surroundings."""

    def __init__(self, scenario: Scenario, write: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.queue = EventQueue()
        self.rng = random.Random(f"{scenario.seed}/processes")
        self.log = Log(self.queue, write)
        self.network = Network(
            self.queue, random.Random(f"{scenario.seed}/network"), scenario.delay_s, self.log.note
        )
        self.oracles: dict[RequestId, Oracle] = {}
        self.redis = Redis(self.queue) if scenario.num_routers > 1 else None
        self.routers: list[RouterProcess] = []  # the present one of each slot
        self.workers: dict[WorkerId, WorkerProcess] = {}  # the newest of each name
        self._started: list[WorkerProcess] = []
        self.counters: Counter[str] = Counter()
        self.on_exit: Callable[[WorkerProcess], None] = lambda worker: None
        self.ended_at: dict[RequestId, float] = {}
        self.num_faults = 0
        self.held_up_until = 0.0  # a process or a stream was held up; infinity: it still is

    def add(self, worker: WorkerProcess) -> None:
        """The newest of its name."""
        self.workers[worker.worker] = worker
        self._started = [known for known in self._started if known.is_alive]
        self._started.append(worker)

    def alive(self) -> list[WorkerProcess]:
        """All workers that live, older epochs too, in the order they were started."""
        return [worker for worker in self._started if worker.is_alive]
