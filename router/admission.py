"""Requests that wait for a place: a bounded queue, fair between tenants, that holds nothing of any worker.

1. A request that finds no room enters. Beyond `max_queued`, or when those before it will not have gone in
   time (`expected_wait_s`), it is refused at once with an honest Retry-After. A tenant's flood fills the
   queue for itself only: one of another takes the place of its last (`displaced_by`).
2. Whenever a worker may have room again, `candidates` names who may try: tenants in turn, by the work that
   each got (`router.fair_lines`), oldest first within each. One that does not fit is passed over, so a huge
   prompt does not stop the small ones behind it ...
3. ... for `max_overtake_s`. Once the one whose turn it is has waited that long nobody passes it: room
   collects for it.
4. A request leaves when it is placed, when its client left (nothing was sent for it anywhere), or at its
   deadline.

Order within a tenant: by priority, then by arrival; a retried request keeps its arrival and so goes first.
Bounds: `max_queued` requests, at most `MAX_SCAN` of them tried at a time.
"""

from __future__ import annotations

import math
from collections import deque

from cluster.ids import RequestId
from router.fair_lines import Claimant, FairLines, Turn

MAX_SCAN = 64
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
_RATE_WINDOW = 32
_NOBODYS = Turn()
_FEWEST_DEPARTURES = 8  # since somebody waits, before the rate of departures says anything


class AdmissionQueue:
    """Who waits, whose turn it is, and how fast places become free."""

    def __init__(self, max_queued: int, max_overtake_s: float) -> None:
        self._max_queued = max_queued
        self._max_overtake_s = max_overtake_s
        self._lines = FairLines()
        self._departures: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._busy_since: float | None = None  # somebody has waited from then on
        self._num_departed = 0  # since then

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, request: RequestId) -> bool:
        return self._lines.get(request) is not None

    @property
    def is_full(self) -> bool:
        return len(self._lines) >= self._max_queued

    def add(self, request: RequestId, order: int, now: float, turn: Turn = _NOBODYS) -> None:
        """`order` of service within the tenant; unique per request."""
        if not self._lines:
            self._busy_since, self._num_departed = now, 0
        self._lines.join(Claimant(request, order, turn, now))

    def placed(self, request: RequestId, turn: Turn = _NOBODYS) -> None:
        """It has its place now, whether it waited or not: its tenant has had a turn."""
        waiting = self._lines.get(request)
        self._lines.served(turn if waiting is None else waiting.turn)
        self._lines.leave(request)

    def remove(self, request: RequestId) -> None:
        """It waits no more, and has no place. Fine for a request that does not wait."""
        self._lines.leave(request)

    def displaced_by(self, tenant: str, share: float) -> RequestId | None:
        """Who has to go when the queue is full and one of this tenant comes; None: the newcomer."""
        return self._lines.overlong(tenant, share)

    def may_pass(self, now: float) -> bool:
        """Whether a newcomer may be placed although others wait."""
        first = self._lines.first()
        return first is None or now - first.since < self._max_overtake_s

    def candidates(self) -> list[RequestId]:
        """Who may try to be placed now, in this order. The caller stops at the first that does not fit and
        is overdue: those behind it must wait until it is placed."""
        return self._lines.in_turn(MAX_SCAN)

    def is_overdue(self, request: RequestId, now: float) -> bool:
        waiting = self._lines.get(request)
        assert waiting is not None, request
        return now - waiting.since >= self._max_overtake_s

    def departed(self, now: float) -> None:
        """A request ended that had held a place."""
        self._departures.append(now)
        self._num_departed += 1

    def expected_wait_s(self, now: float, tenant: str = "") -> float | None:
        """How long one of this tenant who comes last will wait for a place, at the rate at which places
        became free since somebody waits; None while that says too little."""
        if not self._lines or self._busy_since is None or self._num_departed < _FEWEST_DEPARTURES:
            return None
        num_places = self._lines.num_before(tenant) + 1
        return num_places * (now - self._busy_since) / self._num_departed

    def retry_after_s(self, now: float, tenant: str = "") -> float:
        """When a place can be expected by one of this tenant who comes last: those before it over the rate at
        which places became free lately, in whole seconds of 1 to `MAX_RETRY_AFTER_S`."""
        if len(self._departures) < 2:
            return DEFAULT_RETRY_AFTER_S
        span_s = max(now - self._departures[0], 1e-3)
        expected_s = (self._lines.num_before(tenant) + 1) * span_s / len(self._departures)
        return float(min(max(math.ceil(expected_s), DEFAULT_RETRY_AFTER_S), MAX_RETRY_AFTER_S))
