"""How fast a worker prefills, as it measures itself: tokens over seconds, recent steps weighing more.

Sums are smoothed, not rates: a step of three tokens says little, whatever its rate.
"""

from __future__ import annotations

DECAY = 0.8  # weight of everything before the newest step


class RateMeter:
    """`tokens_per_s` is 0.0 until something was measured."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._tokens = DECAY * self._tokens + num_tokens
        self._seconds = DECAY * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
