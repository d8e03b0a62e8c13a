"""One deadline per key, and which is next: how everything that waits in the conductor gets its end.

A heap with lazy deletion: setting a later deadline or dropping a key leaves the old heap entry, which
is skipped when it surfaces; when such leftovers outnumber the live keys the heap is rebuilt.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_LEFTOVERS = 64


class Deadlines(Generic[K]):
    """Deadlines in the clock of the caller's `now`. Keys due at one time come in the order they were set."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._due)

    def get(self, key: K) -> float | None:
        return self._due.get(key)

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of `key`."""
        known = self._due.get(key)
        self._due[key] = at
        if known is None or at < known:  # a later one is found when the earlier entry surfaces
            self._push(key, at)
        num_entries = len(self._heap)
        if num_entries > _MIN_LEFTOVERS and num_entries > 2 * len(self._due) + _MIN_LEFTOVERS:
            self._rebuild()

    def drop(self, key: K) -> None:
        """Forget `key`; unknown keys are fine."""
        self._due.pop(key, None)
        if not self._due:
            self._heap.clear()

    def may_end_before(self, at: float) -> bool:
        """Whether any deadline can be sooner than `at`; looks at one entry, which may be a leftover."""
        return bool(self._heap) and self._heap[0][0] < at

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap:
            at, _, key = self._heap[0]
            due = self._due.get(key)
            if due == at:
                return at
            heapq.heappop(self._heap)
            if due is not None and due > at:
                self._push(key, due)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline is not after `now`, earliest first."""
        due: list[K] = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            due.append(key)
        if not self._due:
            self._heap.clear()
        return due

    def _push(self, key: K, at: float) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, key))

    def _rebuild(self) -> None:
        self._heap = []
        for key, at in self._due.items():
            self._push(key, at)
        # `_push` keeps the heap property; insertion order keeps ties in the order they were set
