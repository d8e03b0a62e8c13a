"""Virtual time: what is to happen, in order of time, ties in the order they were scheduled.

1. `at` and `after` schedule a call.
2. `run` makes the calls one after the other; `now` is the time of the present one. No call takes time.
3. An *alarm* is called before the n-th call of the run: so a fault can hit any message or step there is.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from typing import Any

_NEVER = sys.maxsize


class EventQueue:
    """Deterministic: equal schedules give equal runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._is_stopped = False
        self._alarm_at = _NEVER
        self._alarm: Callable[[], None] | None = None

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call at this time, not before `now`."""
        self.push(time_s, call, args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.push(self.now + delay_s, call, args)

    def push(self, time_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """As `at`, where the arguments are a tuple already."""
        self._serial = serial = self._serial + 1
        heapq.heappush(self._heap, (time_s, serial, call, args))

    def alarm(self, after_events: int, call: Callable[[], None]) -> None:
        """Before the call that comes after `after_events` more, once. There is one alarm at a time."""
        self._alarm_at, self._alarm = self.num_events + after_events + 1, call

    def cancel_alarm(self) -> None:
        self._alarm_at, self._alarm = _NEVER, None

    def stop(self) -> None:
        """`run` returns after the present call."""
        self._is_stopped = True

    def run(self, until_s: float) -> bool:
        """Run up to this time; True if `stop` ended it before."""
        heap, pop = self._heap, heapq.heappop
        self._is_stopped = False
        while heap and heap[0][0] <= until_s:
            time_s, _, call, args = pop(heap)
            if time_s > self.now:
                self.now = time_s
            self.num_events += 1
            if self.num_events >= self._alarm_at:
                alarm = self._alarm
                self.cancel_alarm()
                assert alarm is not None
                alarm()
            call(*args)
            if self._is_stopped:
                return True
        self.now = max(self.now, until_s)
        return False
