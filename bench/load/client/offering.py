"""When each request is due: the plan's moments, free slots, answered turns. No IO, no clock.

A chain is a chat's turns in order, or one request alone.

1. Open loop: the first request of every chain is due at its planned moment.
2. Closed loop: from time 0 on, as many chains as there are slots are opened one after the other; when a
   chain ends, the next one, in plan order, is due at that moment. A chat keeps its slot while it thinks: a
   slot is one user. A user arrives when its slot is opened, so the first request of a slot is scheduled when
   the client turns to it: a thousand users cannot come in the same instant, and no plan says they should.
3. The next turn of a chain is due `think_s` after the last answer's end. If that failed, the rest is never
   sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from bench.load.client.frames import Job


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
        self._opening: deque[Job] = deque()  # first requests of slots that are not open yet
        self._waiting: deque[Job] = deque()
        if num_slots is None:
            for job in heads:
                self._push(job.scheduled_s, job)
        else:
            self._opening.extend(heads[:num_slots])
            self._waiting.extend(heads[num_slots:])

    @property
    def next_due_s(self) -> float | None:
        """None: nothing is due before an answer ends, or ever."""
        if self._opening:
            return 0.0
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> Due | None:
        """The request that has been due longest, if any is."""
        if self._opening:
            return Due(now_s, self._opening.popleft()) if now_s >= 0.0 else None
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
        dropped += [Due(now_s, job) for job in (*self._opening, *self._waiting)]
        dropped += [Due(now_s, job) for later in self._later_turns.values() for job in later]
        self._heap.clear()
        self._opening.clear()
        self._waiting.clear()
        self._later_turns = {session: deque() for session in self._later_turns}
        return dropped

    def _push(self, due_s: float, job: Job) -> None:
        heapq.heappush(self._heap, (due_s, job.index, job))
