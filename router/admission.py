"""Requests that wait for a place: a bounded, ordered queue that holds nothing of any worker.

1. A request that finds no room enters. Beyond `max_queued`, or when the queue before it will not have gone
   in time (`expected_wait_s`), it is refused at once with an honest Retry-After.
2. Whenever a worker may have room again, `candidates` names who may try, oldest first: one that does not fit
   is passed over, so a huge prompt does not stop the small ones behind it ...
3. ... for `max_overtake_s`. Once the oldest has waited that long nobody passes it: room collects for it.
4. A request leaves when it is placed, when its client left (nothing was sent for it anywhere), or at its
   deadline.

Order: by arrival; a retried request keeps its arrival and so goes first. Bounds: `max_queued` requests, at
most `MAX_SCAN` of them tried at a time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from cluster.ids import RequestId

MAX_SCAN = 64
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
_RATE_WINDOW = 32
_FEWEST_DEPARTURES = 8  # since somebody waits, before the rate of departures says anything


class AdmissionQueue:
    """Waiting requests by arrival, and how fast places become free."""

    def __init__(self, max_queued: int, max_overtake_s: float) -> None:
        self._max_queued = max_queued
        self._max_overtake_s = max_overtake_s
        self._waiting: list[tuple[int, RequestId]] = []  # (order of arrival, request), sorted
        self._waiting_since: dict[RequestId, tuple[int, float]] = {}
        self._departures: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._busy_since: float | None = None  # somebody has waited from then on
        self._num_departed = 0  # since then

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._waiting_since

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._max_queued

    def add(self, request: RequestId, order: int, now: float) -> None:
        """`order` is the order of arrival, unique per request."""
        assert request not in self._waiting_since, request
        if not self._waiting:
            self._busy_since, self._num_departed = now, 0
        insort(self._waiting, (order, request))
        self._waiting_since[request] = (order, now)

    def remove(self, request: RequestId) -> None:
        """Fine for a request that does not wait."""
        known = self._waiting_since.pop(request, None)
        if known is not None:
            self._waiting.remove((known[0], request))

    def may_pass(self, now: float) -> bool:
        """Whether a newcomer may be placed although others wait."""
        return not self._waiting or not self.is_overdue(self._waiting[0][1], now)

    def candidates(self) -> list[RequestId]:
        """Who may try to be placed now, in this order. The caller stops at the first that does not fit and
        is overdue: those behind it must wait until it is placed."""
        return [request for _, request in self._waiting[:MAX_SCAN]]

    def is_overdue(self, request: RequestId, now: float) -> bool:
        return now - self._waiting_since[request][1] >= self._max_overtake_s

    def departed(self, now: float) -> None:
        """A request ended that had held a place."""
        self._departures.append(now)
        self._num_departed += 1

    def expected_wait_s(self, now: float) -> float | None:
        """How long one who comes last will wait for a place, at the rate at which places became free since
        somebody waits; None while that says too little."""
        if not self._waiting or self._busy_since is None or self._num_departed < _FEWEST_DEPARTURES:
            return None
        return (len(self._waiting) + 1) * (now - self._busy_since) / self._num_departed

    def retry_after_s(self, now: float) -> float:
        """When a place can be expected by one who comes last: the queue over the rate at which places became
        free lately, in whole seconds of 1 to `MAX_RETRY_AFTER_S`."""
        if len(self._departures) < 2:
            return DEFAULT_RETRY_AFTER_S
        span_s = max(now - self._departures[0], 1e-3)
        expected_s = (len(self._waiting) + 1) * span_s / len(self._departures)
        return float(min(max(math.ceil(expected_s), DEFAULT_RETRY_AFTER_S), MAX_RETRY_AFTER_S))
