"""How long a step takes, as a function of what is in it: predicted, inverted, learned from steps that ran.

    step_s = fixed + max(floor, per_token * m) + per_context * ctx + per_attention * att

`m` is the tokens in the step, `ctx` the keys its decode rows read, `att` the query-key pairs of its prefill
chunks. `floor` is the time to read the weights once, whatever the batch: up to the ridge,
`floor / per_token` tokens, a chunk rides for free.

1. A worker (or a calibration, or a table of hardware) supplies a `StepModel`.
2. A scheduler asks `most_chunk_tokens`: how much of a prompt fits into a step of so many seconds.
3. A router asks `step_s` for what a placement would do to those who decode there.
4. `StepModelFit` takes (work, seconds) of steps that ran and gives the model that explains them best.

Pure and without a clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]
_Flags = NDArray[np.bool_]

_MAX_ROUNDS = 8  # of assigning steps to one side of the ridge


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes. `attention` of a chunk of n tokens after p: n * p + n * (n + 1) / 2."""

    num_tokens: int  # decode rows and chunk tokens
    context: int = 0  # keys read by decode rows, summed
    attention: float = 0.0  # query-key pairs of chunks, summed


def chunk_attention(start: int, num_tokens: int) -> float:
    """Query-key pairs of a chunk of `num_tokens` that follow `start` tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds; see the module."""

    fixed_s: float
    floor_s: float
    per_token_s: float
    per_context_s: float
    per_attention_s: float

    def step_s(self, work: StepWork) -> float:
        return (
            self.fixed_s
            + max(self.floor_s, self.per_token_s * work.num_tokens)
            + self.per_context_s * work.context
            + self.per_attention_s * work.attention
        )

    @property
    def ridge_tokens(self) -> float:
        """Tokens in a step up to which reading the weights takes longer than the arithmetic."""
        return self.floor_s / self.per_token_s if self.per_token_s > 0 else math.inf

    def most_chunk_tokens(self, beside: StepWork, start: int, limit: int, budget_s: float) -> int:
        """The longest chunk, `limit` at most, of a prompt whose first `start` tokens are computed, that fits
        beside `beside` into a step of `budget_s`; 0 if none does.

        Both sides of the ridge are a quadratic in the chunk's length n; the smaller answer holds for both:
            per_attention / 2 * n^2 + (per_attention * (start + 1/2) + [per_token]) * n <= what is left
        """
        left_s = budget_s - self.fixed_s - self.per_context_s * beside.context
        left_s -= self.per_attention_s * beside.attention
        square, line = self.per_attention_s / 2, self.per_attention_s * (start + 0.5)
        below = _most(square, line, left_s - self.floor_s)
        above = _most(square, line + self.per_token_s, left_s - self.per_token_s * beside.num_tokens)
        return max(0, math.floor(min(below, above, limit)))


def _most(square: float, line: float, left: float) -> float:
    """The largest n with square * n^2 + line * n <= left; all coefficients are at least 0."""
    if left < 0:
        return 0.0
    if square > 0:
        # the form of the root that does not cancel where `square` is small beside `line`
        return 2 * left / (line + math.sqrt(line * line + 4 * square * left))
    return left / line if line > 0 else math.inf


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
