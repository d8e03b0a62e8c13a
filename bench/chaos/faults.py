"""Faults on the workers of a running cluster: which, on whom, when, and what the router's log says of them.

1. `Injector.next` picks a kind and a worker from a seed: never the last decode worker that serves, so that
   every stream can still be served.
2. KILL ends the process; when it had ended is noted. STOP freezes it: half of them go on after `AWAKE_S`,
   when the router has given them up, the others stay until the launcher kills them. TERM asks it to drain.
3. `read_events` reads the router's log (JSON lines): when a worker was gone for it, which requests moved, how
   long each was without a token.
"""

from __future__ import annotations

import calendar
import json
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

AWAKE_S: Final = 3.6
ENDED_S: Final = 60.0  # a killed process that has not ended by then is not waited for
SETTLED_S: Final = 8.0  # after a fault, what `/cluster` says of its victim is true

_GONE = re.compile(r"(\S+) epoch (\d+) is gone: (.*)")
_RETRIED = re.compile(r"(\S+) RETRIED worker=\S+ (\S+?): (.*)")
_RESUMED = re.compile(r"(\S+) RESUMED .*resumed_s=(\S+) prefill_s=(\S+) queue_s=(\S+)")


class Kind(Enum):
    """The value is the signal's name."""

    KILL = "KILL"
    STOP = "STOP"
    TERM = "TERM"


@dataclass(frozen=True, slots=True)
class Fault:
    """One signal sent; `at` is wall-clock time."""

    kind: Kind
    worker: str
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The router gave a worker up."""

    worker: str
    epoch: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Moved:
    """A request lost an attempt; `worker` is whom it was lost with."""

    request: str
    worker: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The first token after that; seconds since the loss, and of those, recompute and its queue."""

    request: str
    gap_s: float
    prefill_s: float
    queue_s: float
    at: float


class Injector:
    """Chooses and sends. `workers` are the entries of `/cluster`."""

    def __init__(
        self,
        seed: int,
        kinds: tuple[Kind, ...] = tuple(Kind),
        ended: dict[tuple[str, int], float] | None = None,
    ) -> None:
        """`ended` is filled with when killed processes had ended: (worker, epoch) |-> wall-clock time."""
        self._ended = {} if ended is None else ended
        self._rng = random.Random(seed)
        self._kinds = kinds
        self._turn = 0
        self._hit_at: dict[tuple[str, int], float] = {}  # (worker, epoch) |-> monotonic seconds

    def next(self, workers: list[dict[str, Any]]) -> Fault | None:
        """Send the next fault; None while nobody may be hit."""
        serving = [worker for worker in workers if worker["state"] == "ready" and self._is_unhurt(worker)]
        decodes = [worker for worker in serving if worker["role"] == "decode"]
        victims = [worker for worker in serving if worker["role"] == "prefill" or len(decodes) > 1]
        if not victims:
            return None
        victim = self._rng.choice(victims)
        kind = self._kinds[self._turn % len(self._kinds)]
        self._turn += 1
        self._hit_at[victim["id"], victim["epoch"]] = time.monotonic()
        process = os.pidfd_open(victim["pid"])
        fault = Fault(kind, victim["id"], victim["epoch"], time.time())
        signal.pidfd_send_signal(process, signal.Signals[f"SIG{kind.value}"])
        if kind is Kind.KILL:
            watch = threading.Thread(target=self._await_end, args=(process, fault), daemon=True)
            watch.start()
        else:
            os.close(process)
        if kind is Kind.STOP and self._rng.random() < 0.5:
            wake = threading.Timer(AWAKE_S, _awaken, (victim["pid"],))
            wake.daemon = True
            wake.start()
        return fault

    def _await_end(self, process: int, fault: Fault) -> None:
        """Closes `process`, a pidfd: it is readable when the process has ended."""
        try:
            readable, _, _ = select.select([process], [], [], ENDED_S)
            if readable:
                self._ended[fault.worker, fault.epoch] = time.time()
        finally:
            os.close(process)

    def _is_unhurt(self, worker: dict[str, Any]) -> bool:
        """Not hit just now: a stopped worker looks ready until it is found silent."""
        hit_at = self._hit_at.get((worker["id"], worker["epoch"]))
        return hit_at is None or time.monotonic() - hit_at > SETTLED_S


def _awaken(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # the launcher was first


def read_events(log: Path) -> Iterator[Gone | Moved | Resumed]:
    """What the router's log tells, in order."""
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        message, at = record["message"], _seconds(record["time"])
        if match := _GONE.fullmatch(message):
            yield Gone(match[1], int(match[2]), match[3], at)
        elif match := _RETRIED.fullmatch(message):
            yield Moved(match[1], match[2], match[3], at)
        elif match := _RESUMED.fullmatch(message):
            yield Resumed(match[1], float(match[2]), float(match[3]), float(match[4]), at)


def _seconds(text: str) -> float:
    """`2026-01-31T12:00:00.123Z` as seconds since the epoch."""
    whole, _, milliseconds = text.removesuffix("Z").partition(".")
    return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + int(milliseconds) / 1000
