"""How long a prefill will take somewhere: first estimates, from what workers report of themselves.

A worker's smoothed rate (`WorkerLoad.prefill_tokens_per_s`) is its own measurement on its own hardware. Where
nothing was measured the estimate says so, and policies decide what that means.

    prefill_s(n) = floor + n / rate          ttft_s = floor + (tokens ahead + n) / rate
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import PolicyConfig
from router.view import WorkerView


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """Seconds from now: `ttft_s` until token 0, of which `compute_s` is this prompt's own computation."""

    ttft_s: float
    compute_s: float
    is_measured: bool


def prefill_rate(worker: WorkerView) -> float | None:
    """Prompt tokens per second this worker has shown, or None."""
    rate = worker.load.prefill_tokens_per_s
    return rate if rate > 0 else None


def estimate_prefill(
    worker: WorkerView, num_uncached: int, config: PolicyConfig, assumed_rate: float | None = None
) -> PrefillEstimate:
    """Time for `num_uncached` tokens behind the worker's backlog. `assumed_rate` stands in for a missing
    measurement, and the configured default for that."""
    measured = prefill_rate(worker)
    rate = measured or assumed_rate or config.default_prefill_tokens_per_s
    compute_s = config.ttft_floor_s + num_uncached / rate
    return PrefillEstimate(
        ttft_s=compute_s + worker.backlog_tokens / rate,
        compute_s=compute_s,
        is_measured=measured is not None or assumed_rate is not None,
    )


def decode_harm_s(worker: WorkerView, compute_s: float) -> float:
    """Seconds of delay, summed over the requests decoding here, that a local prefill of `compute_s` costs:
    while a chunk is computed every one of them waits. Those on their way here will be decoding by then."""
    return max(worker.load.running, worker.num_in_flight) * compute_s
