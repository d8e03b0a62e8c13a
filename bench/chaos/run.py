"""One chaos run: the undisturbed answers, then the same requests under faults, then quiet.

1. Every request once, nothing disturbed: the reference.
2. Streams are kept going, `concurrency` at a time, each with a cache salt of its own, so that every one
   prefills and ships its KV. Meanwhile faults are sent, one at a time and evenly over the streams: a request
   that meets a fault in each of its attempts would rightly fail.
3. With `rolling`, all workers are replaced by `baton restart` under the same load.
4. When every stream has ended: nothing runs, waits or holds a block on any worker, or it is told.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.chaos.faults import Fault, Gone, Injector, Kind, Moved, Resumed, read_events
from bench.chaos.streams import Answer, build_bodies, read_stream
from bench.served import HOST, ServedCluster
from cluster.rolling_restart import restart_workers

QUIET_TIMEOUT_S: Final = 30.0
FAULT_TIMEOUT_S: Final = 120.0  # until somebody may be hit
ROLLING_TIMEOUT_S: Final = 600.0
TWO_AND_TWO: Final = ("--prefill", "2", "--decode", "2", "--threads-per-worker", "1")


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """`num_bodies` different requests are repeated until `num_streams` ended and `num_faults` were sent."""

    num_streams: int
    num_faults: int
    kinds: tuple[Kind, ...] = tuple(Kind)  # in turn
    seed: int = 1
    num_bodies: int = 40
    concurrency: int = 8
    max_prompt_words: int = 120
    max_tokens: int = 48
    pause_s: float = 2.0  # between two faults, at least
    rolling: bool = False
    arguments: tuple[str, ...] = TWO_AND_TWO


@dataclass(slots=True)
class ChaosOutcome:
    """What happened. `wrong` holds the answers that differ from the reference or did not complete."""

    num_streams: int = 0
    num_complete: int = 0
    num_equal: int = 0
    num_moved: int = 0  # streams that took more than one attempt
    wrong: list[tuple[dict[str, Any], Answer, Answer]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    gone: list[Gone] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)
    ended: dict[tuple[str, int], float] = field(default_factory=dict)  # (worker, epoch) |-> wall-clock
    rolling_s: float | None = None
    stale_messages: dict[str, int] = field(default_factory=dict)
    is_quiet: bool = False
    duration_s: float = 0.0


class Load:
    """Keeps streams going until it is closed; every answer is compared with the reference."""

    def __init__(
        self, cluster: ServedCluster, settings: ChaosSettings, reference: list[Answer], outcome: ChaosOutcome
    ) -> None:
        self._cluster, self._settings, self._reference = cluster, settings, reference
        self._bodies = _bodies(settings)
        self._outcome = outcome
        self._lock = threading.Lock()
        self._num_started = 0
        self._closing = threading.Event()
        self.enough = threading.Event()
        self._pool = ThreadPoolExecutor(settings.concurrency)
        self._loops: list[Future[None]] = [
            self._pool.submit(self._go_on) for _ in range(settings.concurrency)
        ]

    def close(self) -> None:
        """No new streams; returns when those under way have ended."""
        self._closing.set()
        self._pool.shutdown(wait=True)
        for loop in self._loops:
            loop.result()

    def _go_on(self) -> None:
        try:
            while not self._closing.is_set():
                with self._lock:
                    index = self._num_started
                    self._num_started += 1
                path, body = self._bodies[index % len(self._bodies)]
                answer = read_stream(HOST, self._cluster.port, path, body | {"cache_salt": f"stream-{index}"})
                with self._lock:
                    self._book(body, answer, self._reference[index % len(self._bodies)])
        finally:
            self.enough.set()  # if this loop failed, nobody is to wait for its streams: `close` tells

    def _book(self, body: dict[str, Any], answer: Answer, expected: Answer) -> None:
        outcome = self._outcome
        outcome.num_streams += 1
        outcome.num_moved += answer.attempts > 1
        outcome.num_complete += answer.is_complete
        is_equal = answer.is_complete and answer.result() == expected.result()
        outcome.num_equal += is_equal
        if not is_equal:
            outcome.wrong.append((body, answer, expected))
        if outcome.num_streams >= self._settings.num_streams:
            self.enough.set()


def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> ChaosOutcome:
    """See the module."""
    outcome = ChaosOutcome()
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as logs:
        arguments = [*settings.arguments, "--log-dir", logs, "--log-format", "json"]
        with ServedCluster(arguments) as cluster:
            say(f"serving after {cluster.start_s:.1f} s; {settings.num_bodies} requests undisturbed first")
            reference = _reference(cluster, settings)
            started = time.monotonic()
            with _load(cluster, settings, reference, outcome) as load:
                _disturb(cluster, settings, outcome, say)
                load.enough.wait()
                if settings.rolling:
                    say("rolling restart of all workers")
                    outcome.rolling_s = restart_workers(cluster.url, ROLLING_TIMEOUT_S, say)
            outcome.duration_s = time.monotonic() - started
            outcome.is_quiet = cluster.wait_quiet(QUIET_TIMEOUT_S)
            outcome.stale_messages = cluster.get("/cluster")["stale_messages"]
        for event in read_events(Path(logs) / "router-0.log"):
            match event:
                case Gone():
                    outcome.gone.append(event)
                case Moved():
                    outcome.moved.append(event)
                case Resumed():
                    outcome.resumed.append(event)
    return outcome


def _bodies(settings: ChaosSettings) -> list[tuple[str, dict[str, Any]]]:
    return build_bodies(settings.num_bodies, settings.seed, settings.max_prompt_words, settings.max_tokens)


def _reference(cluster: ServedCluster, settings: ChaosSettings) -> list[Answer]:
    with ThreadPoolExecutor(settings.concurrency) as pool:
        answers = list(pool.map(lambda item: read_stream(HOST, cluster.port, *item), _bodies(settings)))
    for answer in answers:
        if not answer.is_complete or answer.attempts != 1:
            raise RuntimeError(f"the undisturbed run was disturbed: {answer}")
    return answers


@contextlib.contextmanager
def _load(
    cluster: ServedCluster, settings: ChaosSettings, reference: list[Answer], outcome: ChaosOutcome
) -> Iterator[Load]:
    load = Load(cluster, settings, reference, outcome)
    try:
        yield load
    finally:
        load.close()


def _disturb(
    cluster: ServedCluster, settings: ChaosSettings, outcome: ChaosOutcome, say: Callable[[str], None]
) -> None:
    injector = Injector(settings.seed, settings.kinds, outcome.ended)
    while len(outcome.faults) < settings.num_faults:
        time.sleep(settings.pause_s)
        deadline = time.monotonic() + FAULT_TIMEOUT_S
        due = len(outcome.faults) * settings.num_streams // settings.num_faults
        while outcome.num_streams < due:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress: {json.dumps(cluster.get('/cluster'))}")
            time.sleep(0.1)
        while (fault := injector.next(cluster.get("/cluster")["workers"])) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody serves any more: {json.dumps(cluster.get('/cluster'))}")
            time.sleep(0.2)
        outcome.faults.append(fault)
        say(
            f"{len(outcome.faults):3} {fault.kind.value} {fault.worker} epoch {fault.epoch} "
            f"({outcome.num_streams} streams ended, {outcome.num_equal} equal)"
        )
