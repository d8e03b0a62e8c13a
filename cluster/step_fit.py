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

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.step_model import StepModel, StepWork

_Array = NDArray[np.float64]

_SMALLEST_ERROR = 0.005  # relative; below it a row weighs no more
_SETTLED = 1e-4  # relative change of the predictions
_ANCHOR_WEIGHT = 0.1  # of a prediction of the base model, against a step that ran
_LEAST_SHARE = 0.5  # of the quickest step that ran, where the fit leaves nothing to an empty one
_LARGE_RIDGE = 4096.0  # tokens, at most, around which anchors lie
_LARGE_CONTEXT = 1e7  # keys, at most, in an anchor
_LARGE_PAIRS = 1e12  # query-key pairs, at most, in an anchor
_DAMPING = 1e-12 * np.eye(6)  # of the normal equations, their diagonal being 1


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
        steps = np.concatenate([ring.steps for ring in self._rings], axis=1)
        num_steps = steps.shape[1]
        if not num_steps:
            return self._base
        scale = median(steps[3] / _predict(self._base, steps))
        anchors = self._anchors.copy()
        anchors[3] *= scale
        steps = np.concatenate([steps, anchors], axis=1)
        trust = np.ones(steps.shape[1])
        trust[num_steps:] = _ANCHOR_WEIGHT
        model = start or self._base.slower(scale)
        problem, seconds = _Relative(steps), steps[3]
        predicted = _predict(model, steps)
        for _ in range(num_rounds):
            errors = predicted / seconds
            errors -= 1
            np.abs(errors, out=errors)
            np.maximum(errors, _SMALLEST_ERROR, out=errors)
            weights = np.divide(trust, errors, out=errors)
            ridge = model.ridge_tokens if model.per_token_s > 0 else self._base.ridge_tokens
            model = problem.solve(ridge, weights)
            before, predicted = predicted, _predict(model, steps)
            change = np.divide(predicted, before, out=before)
            if change.item(change.argmax()) - 1 < _SETTLED and 1 - change.item(change.argmin()) < _SETTLED:
                break
        if model.fixed_s + model.floor_s <= 0:  # no step is free, whatever contradictory ones say together
            model = msgspec.structs.replace(model, fixed_s=_LEAST_SHARE * float(seconds[:num_steps].min()))
        return model

    def error_quantile(self, model: StepModel, share: float) -> float:
        """The `share` quantile of actual / predicted - 1: what a safe prediction adds."""
        steps = np.concatenate([ring.steps for ring in self._rings], axis=1)
        if not steps.size:
            return 0.0
        return quantile(steps[3] / _predict(model, steps) - 1, share)


def median(values: _Array) -> float:
    """As numpy's, of a few numbers: at a tenth of its price."""
    return quantile(values, 0.5)


def quantile(values: _Array, share: float) -> float:
    """As numpy's linear one; see `median`."""
    ordered = np.sort(values)
    at = (len(ordered) - 1) * share
    index = int(at)
    low, high = ordered.item(index), ordered.item(min(index + 1, len(ordered) - 1))
    rest = at - index
    return float(high - (high - low) * (1 - rest) if rest >= 0.5 else low + (high - low) * rest)


def weighted_quantile(values: _Array, weights: _Array, share: float) -> float:
    """The least value that, with those below, has this share of the weight."""
    order = np.argsort(values)
    weight = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(weight, share * weight[-1])]])


class _Ring:
    """The latest `capacity` steps: (4, steps) of tokens, context, attention, seconds."""

    def __init__(self, capacity: int) -> None:
        self._all = np.empty((4, capacity))
        self._capacity = capacity
        self._next = 0
        self.count = 0

    @property
    def steps(self) -> _Array:
        return self._all[:, : self.count]

    def add(self, work: StepWork, seconds: float) -> None:
        steps, at = self._all, self._next
        steps[0, at], steps[1, at] = work.num_tokens, work.context
        steps[2, at], steps[3, at] = work.attention, seconds
        self._next = (self._next + 1) % self._capacity
        self.count = min(self.count + 1, self._capacity)


def _predict(model: StepModel, steps: _Array) -> _Array:
    """Seconds of each step; `steps`: as `_Ring.steps`."""
    predicted: _Array = model.per_token_s * steps[0]
    np.maximum(model.floor_s, predicted, out=predicted)
    predicted += model.fixed_s
    predicted += model.per_context_s * steps[1]
    predicted += model.per_attention_s * steps[2]
    if model.mixed_s:
        predicted += model.mixed_s * _is_mixed(steps)
    np.maximum(predicted, 1e-9, out=predicted)
    return predicted


def _is_mixed(steps: _Array) -> NDArray[np.bool_]:
    mixed: NDArray[np.bool_] = (steps[1] > 0) & (steps[2] > 0)
    return mixed


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
        StepWork(round(2 * ridge), round(context), pairs),
    ]
    steps = [(w.num_tokens, w.context, w.attention, base.step_s(w)) for w in works]
    return np.array(steps, dtype=np.float64).T.copy()


def _as_long_as(seconds: float, each_s: float, most: float) -> float:
    """How many of what takes `each_s` take so long; what costs nothing, or nearly, is shown by the most."""
    return seconds / each_s if each_s * most > seconds else most


class _Relative:
    """Weighted least squares of relative errors, with the ridge where it is. `steps`: as `_Ring.steps`."""

    def __init__(self, steps: _Array) -> None:
        self._tokens, seconds = steps[0], steps[3]
        self._each = 1.0 / seconds  # what a second more in every step would change
        self._per_token = steps[0] / seconds
        self._columns = np.empty((6, len(seconds)))
        self._columns[0] = self._each
        self._columns[3:5] = steps[1:3] / seconds
        np.multiply(self._each, _is_mixed(steps), out=self._columns[5])
        self._weighted = np.empty_like(self._columns)

    def solve(self, ridge_tokens: float, weights: _Array) -> StepModel:
        columns = self._columns
        is_above = self._tokens > ridge_tokens
        np.multiply(self._each, ~is_above, out=columns[1])
        np.multiply(self._per_token, is_above, out=columns[2])
        weighted = np.multiply(columns, weights, out=self._weighted)
        fixed_s, floor_s, per_token_s, *others = _non_negative(
            weighted @ columns.T, np.add.reduce(weighted, axis=1)
        )
        if 1 not in is_above.tobytes():  # the weights' reading alone: the ridge stays where it is
            per_token_s = floor_s / ridge_tokens
        return StepModel(fixed_s, floor_s, per_token_s, *others)


def _non_negative(gram: _Array, moment: _Array) -> list[float]:
    """The solution of the normal equations with no coefficient below 0, by leaving out the last one if it is
    negative (a price of mixed steps explains noise), else the most negative one, until none is."""
    size = np.sqrt(gram.diagonal())
    kept = [index for index, of_column in enumerate(size.tolist()) if of_column > 0]
    if len(kept) < len(size):
        size[size == 0] = 1.0  # of what no step has: left out
    square = gram / (size[:, None] * size)
    square += _DAMPING
    target = moment / size
    result = [0.0] * len(size)
    while kept:
        if len(kept) == len(size):
            found = np.linalg.solve(square, target)
        else:
            found = np.linalg.solve(square.take(kept, 0).take(kept, 1), target.take(kept))
        worst = len(found) - 1 if found.item(-1) < 0 else int(found.argmin())
        if found.item(worst) >= 0:
            for index, value in zip(kept, (found / size.take(kept)).tolist(), strict=True):
                result[index] = value
            break
        del kept[worst]
    return result
