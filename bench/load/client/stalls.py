"""When the event loop stood still: frozen, starved of CPU, or busy for too long with one thing.

A chunk that arrives meanwhile is read late, and its moment is the client's and not the server's. So the loop
is asked for a look every `LOOK_S`; where that came later than it was due, the loop stood still in between. A
stall shorter than `LOOK_S` may fall between two looks; a longer one is seen, its start late by up to that.
"""

from __future__ import annotations

import asyncio
import heapq
import time

LOOK_S = 0.010
MIN_STALL_S = 0.005
MAX_STALLS = 1000
NS = 1_000_000_000


class Stalls:
    """Owner of what was seen: the longest `MAX_STALLS` stalls of at least `MIN_STALL_S`."""

    def __init__(self) -> None:
        self.max_s = 0.0
        self._longest: list[tuple[float, float]] = []  # a heap of (length, start)

    def note(self, due_s: float, now_s: float) -> None:
        """A look that was due at `due_s` happens at `now_s`."""
        length_s = now_s - due_s
        self.max_s = max(self.max_s, length_s)
        if length_s < MIN_STALL_S:
            return
        if len(self._longest) < MAX_STALLS:
            heapq.heappush(self._longest, (length_s, due_s))
        else:
            heapq.heappushpop(self._longest, (length_s, due_s))

    def in_order(self) -> list[tuple[float, float]]:
        """(start, end), by start."""
        return sorted((start_s, start_s + length_s) for length_s, start_s in self._longest)


class StallWatch:
    """Looks until it is closed. Times are seconds since `start_ns` of the `perf_counter_ns` clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_ns: int) -> None:
        self.stalls = Stalls()
        self._loop = loop
        self._start_ns = start_ns
        self._due_s = 0.0
        self._timer = self._next(self._now_s())

    def close(self) -> None:
        """Look a last time: the loop may have stood still until now."""
        self._timer.cancel()
        self.stalls.note(self._due_s, self._now_s())

    def _next(self, now_s: float) -> asyncio.TimerHandle:
        self._due_s = now_s + LOOK_S
        return self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        now_s = self._now_s()
        self.stalls.note(self._due_s, now_s)
        self._timer = self._next(now_s)

    def _now_s(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / NS
