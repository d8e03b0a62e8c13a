"""When each request is due: the plan's moments, free slots, answered turns. No IO, no clock.

A chain is a chat's turns in order, or one request alone.

1. Open loop: the first request of every chain is due at its planned moment.
2. Closed loop: as many chains as there are slots are due at 0; when a chain ends, the next one, in plan
   order, is due at that moment. A chat keeps its slot while it thinks: a slot is one user.
3. The next turn of a chain is due `think_s` after the last answer's end. If that failed, the rest is never
   sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from bench.load.frames import Job


class Due(NamedTuple):
    scheduled_s: float
    job: Job


class Offering:
    """Owner of what has not been sent yet."""

    def __init__(self, jobs: Iterable[Job], num_slots: int | None) -> None:
        chains: dict[int, deque[Job]] = {}
        heads: list[Job] = []
        for job in sorted(jobs, key=lambda job: (job.turn, job.index)):
            if job.session is None:
                heads.append(job)
            elif job.session in chains:
                chains[job.session].append(job)
            else:
                chains[job.session] = deque()
                heads.append(job)
        self._later_turns = chains
        self._heap: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()
        if num_slots is None:
            for job in heads:
                self._push(job.scheduled_s, job)
        else:
            for job in heads[:num_slots]:
                self._push(0.0, job)
            self._waiting.extend(heads[num_slots:])

    @property
    def next_due_s(self) -> float | None:
        """None: nothing is due before an answer ends, or ever."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> Due | None:
        """The request that has been due longest, if any is."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        scheduled_s, _, job = heapq.heappop(self._heap)
        return Due(scheduled_s, job)

    def ended(self, job: Job, end_s: float, is_ok: bool) -> list[Due]:
        """Note that a request ended; returns the later turns that will therefore never be sent."""
        never: list[Due] = []
        if job.session is not None:
            later = self._later_turns[job.session]
            if later and is_ok:
                turn = later.popleft()
                self._push(end_s + turn.think_s, turn)
                return never
            never = [Due(end_s, turn) for turn in later]
            later.clear()
        if self._waiting:
            self._push(end_s, self._waiting.popleft())
        return never

    def drop_all(self, now_s: float) -> list[Due]:
        """Give up all that was not sent. What had no moment yet gets `now_s`."""
        dropped = [Due(scheduled_s, job) for scheduled_s, _, job in sorted(self._heap)]
        dropped += [Due(now_s, job) for job in self._waiting]
        dropped += [Due(now_s, job) for later in self._later_turns.values() for job in later]
        self._heap.clear()
        self._waiting.clear()
        self._later_turns = {session: deque() for session in self._later_turns}
        return dropped

    def _push(self, due_s: float, job: Job) -> None:
        heapq.heappush(self._heap, (due_s, job.index, job))
