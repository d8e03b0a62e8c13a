"""How long a step may take before it counts as stuck: judged by what steps have taken here. Pure.

1. `limit_s(plan)` before a step: `FACTOR` times what the slowest step so far, per unit of work, predicts for
   this one; at least `min_s`, at most `max_s`, which also holds while nothing is measured.
2. `observe(plan, compute_s)` after it. The slowest is forgotten slowly, so that one hiccup does not blunt the
   watch for good.

A step's work, in tokens: `sum over rows of tokens x (1 + context / CONTEXT_TOKENS) + FIXED_TOKENS`. Only its
order of magnitude matters: a stuck step takes forever.
"""

from __future__ import annotations

from typing import Final

from cluster.engine.batch import StepPlan

MIN_S: Final = 2.5
FACTOR: Final = 5.0
FIXED_TOKENS: Final = 16.0  # what a step costs beside its tokens: weights are read once
CONTEXT_TOKENS: Final = 2048.0  # attention over so much context costs about what a token's matrices do
FORGET: Final = 0.99


class StepWatchdog:
    """Owns the measure; one per engine."""

    def __init__(self, max_s: float, min_s: float = MIN_S) -> None:
        self._max_s = max_s
        self._min_s = min(min_s, max_s)
        self._slowest_s = 0.0  # per unit of work; 0: nothing measured

    def limit_s(self, plan: StepPlan) -> float:
        """Seconds after which this step counts as stuck."""
        if not self._slowest_s:
            return self._max_s
        return min(self._max_s, max(self._min_s, FACTOR * self._slowest_s * work(plan)))

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        """A step ended by itself."""
        self._slowest_s = max(FORGET * self._slowest_s, compute_s / work(plan))


def work(plan: StepPlan) -> float:
    """See the module."""
    tokens = sum(
        len(row.token_ids) * (1 + (row.start + len(row.token_ids)) / CONTEXT_TOKENS) for row in plan.rows
    )
    return tokens + FIXED_TOKENS
