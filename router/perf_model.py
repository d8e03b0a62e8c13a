"""How long a worker's steps take, for a worker that cannot say it yet.

A worker that has run some steps reports its own `StepModel`, learned on its own hardware. Until then its
smoothed rates stand in, and configured ones where not even those are measured: only ratios matter then.
"""

from __future__ import annotations

from cluster.step_model import StepModel
from cluster.wire.messages import WorkerLoad
from router.config import PolicyConfig


def model_of(load: WorkerLoad, config: PolicyConfig) -> StepModel:
    """The worker's own model, or what its gauges allow to say."""
    if load.step_model is not None:
        return load.step_model
    rate = load.prefill_tokens_per_s or config.default_prefill_tokens_per_s
    return StepModel(0.0, load.decode_step_s or config.default_step_s, 1.0 / rate, 0.0, 0.0)
