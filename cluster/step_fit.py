"""The model of a step's time that explains the steps that ran: least squares on both sides of the ridge.

1. `StepModelFit` takes (work, seconds) of steps that ran, the last few hundred.
2. `fit` gives the model; what the steps cannot tell is as in the prior.
3. `residual_quantile` says how far steps lie above the model.

Pure and without a clock.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from cluster.step_model import StepModel, StepWork

_Array = NDArray[np.float64]
_Flags = NDArray[np.bool_]

_MAX_ROUNDS = 8  # of assigning steps to one side of the ridge


class StepModelFit:
    """Learns from the last `capacity` steps; the least squares of *relative* errors, no coefficient below 0.

    Long steps would otherwise decide everything, and TPOT lives in the short ones.
    """

    def __init__(self, prior: StepModel, capacity: int = 512) -> None:
        self._prior = prior
        self._steps: deque[tuple[StepWork, float]] = deque(maxlen=capacity)

    def add(self, work: StepWork, seconds: float) -> None:
        """A step that ran; steps without tokens or time say nothing."""
        if work.num_tokens > 0 and seconds > 0 and math.isfinite(seconds):
            self._steps.append((work, seconds))

    def __len__(self) -> int:
        return len(self._steps)

    def fit(self) -> StepModel:
        """The prior where there are fewer steps than coefficients."""
        if len(self._steps) < 6:
            return self._prior
        works, seconds = zip(*self._steps, strict=True)
        y = np.array(seconds)
        m = np.array([work.num_tokens for work in works], dtype=float)
        rest = np.array([(work.context, work.attention) for work in works], dtype=float)
        model = self._prior
        for _ in range(_MAX_ROUNDS):
            fitted = self._fit_sides(m, rest, y, m > model.ridge_tokens)
            if fitted == model:
                break
            model = fitted
        return model

    def _fit_sides(self, m: _Array, rest: _Array, y: _Array, is_above: _Flags) -> StepModel:
        """The model with its ridge where `is_above` says; what one side cannot tell is as in the prior."""
        prior = self._prior
        above, below = is_above.any(), not is_above.all()
        columns = [np.ones_like(m)]  # fixed; with nothing above, fixed + floor
        if above:
            columns.append(np.where(is_above, m, 0.0))
            if below:
                columns.append(np.where(is_above, 0.0, 1.0))
        found = _non_negative(np.column_stack((*columns, rest)) / y[:, None], np.ones_like(y))
        fixed_s, per_context_s, per_attention_s = float(found[0]), float(found[-2]), float(found[-1])
        if above:
            per_token_s = float(found[1])
            floor_s = float(found[2]) if below else prior.ridge_tokens * per_token_s
        else:
            share = prior.floor_s / max(prior.fixed_s + prior.floor_s, 1e-12)
            fixed_s, floor_s = fixed_s * (1 - share), fixed_s * share
            per_token_s = floor_s / prior.ridge_tokens if prior.ridge_tokens > 0 else prior.per_token_s
        return StepModel(fixed_s, floor_s, per_token_s, per_context_s, per_attention_s)

    def residual_quantile(self, model: StepModel, share: float) -> float:
        """The `share` quantile of actual / predicted - 1: what a safe prediction adds."""
        if not self._steps:
            return 0.0
        ratios = [seconds / max(model.step_s(work), 1e-9) - 1 for work, seconds in self._steps]
        return float(np.quantile(ratios, share))


def _non_negative(columns: _Array, target: _Array) -> _Array:
    """Least squares with no coefficient below 0, by leaving out the most negative one until none is."""
    result = np.zeros(columns.shape[1])
    kept = [index for index in range(columns.shape[1]) if columns[:, index].any()]
    while kept:
        scale = np.abs(columns[:, kept]).max(axis=0)
        found = np.linalg.lstsq(columns[:, kept] / scale, target, rcond=None)[0] / scale
        worst = int((found * scale).argmin())
        if found[worst] >= 0:
            result[kept] = found
            break
        del kept[worst]
    return result
