"""Keeps the leases that this router's requests hold on decode workers alive.

A lease is entered when granted and dropped when its attempt ends; in between it is renewed at a third of its
time, in one message per worker. A router that dies renews nothing, and its leases expire.
"""

from __future__ import annotations

from cluster.ids import LeaseId, WorkerId
from router.deadlines import Deadlines

_MIN_TTL_S = 0.03


class LeaseKeeper:
    """Live leases per decode worker, and when each worker is due to hear of them."""

    def __init__(self) -> None:
        self._leases: dict[WorkerId, dict[LeaseId, float]] = {}  # lease |-> its time to live, seconds
        self._renewals: Deadlines[WorkerId] = Deadlines()

    def __len__(self) -> int:
        return sum(len(leases) for leases in self._leases.values())

    def add(self, worker: WorkerId, lease: LeaseId, ttl_s: float, now: float) -> None:
        leases = self._leases.setdefault(worker, {})
        leases[lease] = max(ttl_s, _MIN_TTL_S)
        due = now + leases[lease] / 3
        known = self._renewals.get(worker)
        self._renewals.set(worker, due if known is None else min(due, known))

    def drop(self, worker: WorkerId, lease: LeaseId) -> None:
        """Fine for an unknown lease."""
        leases = self._leases.get(worker)
        if leases is not None and leases.pop(lease, None) is not None and not leases:
            self.leave(worker)

    def leave(self, worker: WorkerId) -> None:
        """The worker is gone and its leases with it."""
        self._leases.pop(worker, None)
        self._renewals.drop(worker)

    def may_be_due_before(self, at: float) -> bool:
        return self._renewals.may_end_before(at)

    def next_renewal(self) -> float | None:
        return self._renewals.next()

    def pop_due(self, now: float) -> list[tuple[WorkerId, list[LeaseId]]]:
        """Whom to send which renewals now; their next ones are scheduled."""
        due = []
        for worker in self._renewals.pop_due(now):
            leases = self._leases[worker]
            due.append((worker, list(leases)))
            self._renewals.set(worker, now + min(leases.values()) / 3)
        return due
