"""Time limits of requests in flight: one timer, set for the earliest moment at which one may be too late.

A request is too late without an end `timeout_s` after its start, or without a byte for `stall_s`. Reads
push the second moment back without touching the timer; when it rings, who is not too late is looked at
again at their next moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from bench.load.client.flight import NS, Flight

MIN_DELAY_S = 0.001
GRACE_S = 0.005


class Limits:
    """`flights` is the owner's, and live; `on_late(flight, why, now_ns)` takes a late one out of it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        stall_s: float,
        flights: Collection[Flight],
        on_late: Callable[[Flight, str, int], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._flights = flights
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, flight: Flight) -> None:
        """A flight began. All have the same limits, so a timer that is set rings no later than it needs."""
        if self._timer is None:
            self._set(self._limit_ns(flight))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit_ns(self, flight: Flight) -> int:
        return min(
            flight.started_ns + round(self._timeout_s * NS), flight.last_ns + round(self._stall_s * NS)
        )

    def _set(self, moment_ns: int) -> None:
        delay_s = max(MIN_DELAY_S, (moment_ns - time.perf_counter_ns()) / NS)
        self._timer = self._loop.call_later(delay_s, self._ring)

    def _ring(self) -> None:
        """After a pause of this process the timer rings before the sockets are read: let them be read."""
        self._timer = self._loop.call_later(GRACE_S, self._judge)

    def _judge(self) -> None:
        self._timer = None
        now_ns = time.perf_counter_ns()
        for flight in [flight for flight in self._flights if self._limit_ns(flight) <= now_ns]:
            if flight.started_ns + round(self._timeout_s * NS) <= now_ns:
                error = f"no end within the time limit of {self._timeout_s:g} s, {flight.phase}"
            else:
                error = f"no byte within the stall limit of {self._stall_s:g} s, {flight.phase}"
            if not flight.is_ended:
                self._on_late(flight, error, now_ns)
        if self._timer is None and self._flights:
            self._set(min(self._limit_ns(flight) for flight in self._flights))
