"""How long an answer will be, learned from those that ended: the mean by prompt length.

Buckets are powers of two of the prompt's length; a bucket of few answers leans on the mean of all. Means
forget: the last few thousand answers decide. Pure, without a clock.
"""

from __future__ import annotations

PRIOR_TOKENS = 200.0
PRIOR_WEIGHT = 20.0
MEMORY = 2000  # answers


class OutputLengths:
    """Owns the means."""

    def __init__(self, prior_tokens: float = PRIOR_TOKENS) -> None:
        self._mean = prior_tokens
        self._num = PRIOR_WEIGHT
        self._buckets: dict[int, tuple[float, float]] = {}  # (mean, weight)

    def add(self, num_prompt: int, num_output: int) -> None:
        self._num = min(self._num + 1, MEMORY)
        self._mean += (num_output - self._mean) / self._num
        mean, weight = self._buckets.get(num_prompt.bit_length(), (0.0, 0.0))
        weight = min(weight + 1, MEMORY)
        self._buckets[num_prompt.bit_length()] = (mean + (num_output - mean) / weight, weight)

    @property
    def mean(self) -> float:
        return self._mean

    def expect(self, num_prompt: int) -> float:
        mean, weight = self._buckets.get(num_prompt.bit_length(), (0.0, 0.0))
        return (mean * weight + self._mean * PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
