"""The model of a step's time that explains the steps that ran, whatever disturbed some of them.

1. `StepModelFit` keeps (work, seconds) of the latest steps: those with and those without chunks apart, so
   that a long stretch of decode does not wash out what chunks have taught.
2. `fit` gives the model with the least sum of *relative* errors, no coefficient below 0. Absolute ones would
   be decided by long steps, and TPOT lives in the short ones; squared ones by the steps that something
   disturbed.
3. What the steps say nothing of is as in the base model: a few of its predictions, scaled to this machine,
   are fitted along with little weight.

Least absolute deviations by reweighted least squares: a row weighs 1 / its error. With that, the ridge is
found in turns: each step is on the side where the model so far has it. A refit starts from the model so far,
so few rounds do.

Pure and without a clock.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cluster.step_model import StepModel, StepWork

_Array = NDArray[np.float64]

_SMALLEST_ERROR = 0.005  # relative; below it a row weighs no more
_SETTLED = 1e-4  # relative change of the predictions
_ANCHOR_WEIGHT = 0.1  # of a prediction of the base model, against a step that ran
_LARGE_RIDGE = 4096.0  # tokens, at most, around which anchors lie
_LARGE_CONTEXT = 1e7  # keys, at most, in an anchor
_LARGE_PAIRS = 1e12  # query-key pairs, at most, in an anchor
_DAMPING = 1e-12 * np.eye(5)  # of the normal equations, their diagonal being 1


class StepModelFit:
    """Learns from the last `capacity` steps of each of the two kinds."""

    def __init__(self, base: StepModel, capacity: int = 128) -> None:
        assert base.per_token_s > 0, "a base model without a slope has no ridge"
        self._base = base
        self._anchors = _anchors(base)
        self._rings = (_Ring(capacity), _Ring(capacity))  # without and with chunks

    def __len__(self) -> int:
        return sum(ring.count for ring in self._rings)

    def add(self, work: StepWork, seconds: float) -> None:
        """A step that ran; steps without tokens or time say nothing."""
        if work.num_tokens > 0 and seconds > 0 and math.isfinite(seconds):
            self._rings[work.attention > 0].add(work, seconds)

    def fit(self, start: StepModel | None = None, num_rounds: int = 40) -> StepModel:
        """The base model where no step ran. `start`: the model to improve on."""
        steps = np.concatenate([ring.rows for ring in self._rings])
        if not len(steps):
            return self._base
        scale = median(steps[:, 3] / _predict(self._base, steps))
        anchors = self._anchors.copy()
        anchors[:, 3] *= scale
        rows = np.concatenate([steps, anchors])
        trust = np.ones(len(rows))
        trust[len(steps) :] = _ANCHOR_WEIGHT
        model = start or _scaled(self._base, scale)
        predicted = _predict(model, rows)
        for _ in range(num_rounds):
            weights = trust / np.maximum(np.abs(predicted / rows[:, 3] - 1), _SMALLEST_ERROR)
            ridge = model.ridge_tokens if model.per_token_s > 0 else self._base.ridge_tokens
            model = _least_squares(rows, ridge, weights)
            before, predicted = predicted, _predict(model, rows)
            if float(np.abs(predicted / before - 1).max()) < _SETTLED:
                break
        return model

    def error_quantile(self, model: StepModel, share: float) -> float:
        """The `share` quantile of actual / predicted - 1: what a safe prediction adds."""
        rows = np.concatenate([ring.rows for ring in self._rings])
        if not len(rows):
            return 0.0
        return quantile(rows[:, 3] / _predict(model, rows) - 1, share)


def median(values: _Array) -> float:
    """As numpy's, of a few numbers: at a tenth of its price."""
    return quantile(values, 0.5)


def quantile(values: _Array, share: float) -> float:
    """As numpy's linear one; see `median`."""
    ordered = sorted(values.tolist())
    at = (len(ordered) - 1) * share
    index = int(at)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    rest = at - index
    return float(high - (high - low) * (1 - rest) if rest >= 0.5 else low + (high - low) * rest)


class _Ring:
    """Rows (tokens, context, attention, seconds), the latest `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._all = np.empty((capacity, 4))
        self._next = 0
        self.count = 0

    @property
    def rows(self) -> _Array:
        return self._all[: self.count]

    def add(self, work: StepWork, seconds: float) -> None:
        self._all[self._next] = (work.num_tokens, work.context, work.attention, seconds)
        self._next = (self._next + 1) % len(self._all)
        self.count = min(self.count + 1, len(self._all))


def _predict(model: StepModel, rows: _Array) -> _Array:
    busy_s = np.maximum(model.floor_s, model.per_token_s * rows[:, 0])
    predicted: _Array = (
        model.fixed_s + busy_s + model.per_context_s * rows[:, 1] + model.per_attention_s * rows[:, 2]
    )
    bounded: _Array = np.maximum(predicted, 1e-9)
    return bounded


def _anchors(base: StepModel) -> _Array:
    """Predictions that pin each coefficient: both sides of the ridge, long contexts, long chunks."""
    ridge = min(max(base.ridge_tokens, 8.0), _LARGE_RIDGE)
    reading_s = base.fixed_s + base.floor_s
    context = _as_long_as(reading_s, base.per_context_s, _LARGE_CONTEXT)
    pairs = _as_long_as(base.per_token_s * ridge, base.per_attention_s, _LARGE_PAIRS)
    works = [
        StepWork(1),
        StepWork(round(ridge / 2)),
        StepWork(round(2 * ridge)),
        StepWork(round(4 * ridge)),
        StepWork(4, round(context)),
        StepWork(round(2 * ridge), 0, pairs),
    ]
    return np.array([(w.num_tokens, w.context, w.attention, base.step_s(w)) for w in works], dtype=np.float64)


def _as_long_as(seconds: float, each_s: float, most: float) -> float:
    """How many of what takes `each_s` take so long; what costs nothing, or nearly, is shown by the most."""
    return seconds / each_s if each_s * most > seconds else most


def _scaled(model: StepModel, scale: float) -> StepModel:
    return StepModel(*(getattr(model, name) * scale for name in StepModel.__struct_fields__))


def _least_squares(rows: _Array, ridge_tokens: float, weights: _Array) -> StepModel:
    """Weighted least squares of relative errors, with the ridge where it is."""
    tokens, seconds = rows[:, 0], rows[:, 3]
    is_above = tokens > ridge_tokens
    columns = np.empty((5, len(rows)))
    columns[0] = 1.0
    columns[1] = ~is_above
    columns[2] = tokens * is_above
    columns[3:] = rows[:, 1:3].T
    columns /= seconds
    weighted = columns * weights
    fixed_s, floor_s, per_token_s, per_context_s, per_attention_s = _non_negative(
        weighted @ columns.T, weighted.sum(axis=1)
    )
    if not is_above.any():  # the weights' reading alone: the ridge stays where it is
        per_token_s = floor_s / ridge_tokens
    return StepModel(fixed_s, floor_s, per_token_s, per_context_s, per_attention_s)


def _non_negative(gram: _Array, moment: _Array) -> list[float]:
    """The solution of the normal equations with no coefficient below 0, by leaving out the most negative one
    until none is."""
    size = np.sqrt(gram.diagonal())
    kept = [index for index, of_column in enumerate(size.tolist()) if of_column > 0]
    result = [0.0] * len(size)
    while kept:
        norm = size[kept]
        square = gram[kept][:, kept] / (norm[:, None] * norm) + _DAMPING[: len(kept), : len(kept)]
        found = np.linalg.solve(square, moment[kept] / norm)
        worst = int(found.argmin())
        if found[worst] >= 0:
            for index, value in zip(kept, found / norm, strict=True):
                result[index] = float(value)
            break
        del kept[worst]
    return result
