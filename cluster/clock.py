"""Time as a value: decisions receive `now`, only drivers read a clock."""

import time
from typing import Protocol


def soonest(one: float | None, other: float | None) -> float | None:
    """Of two deadlines; None: nothing waits there."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class Clock(Protocol):
    """Monotonic seconds; the zero is arbitrary, only differences mean something."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told: for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now_s += seconds
