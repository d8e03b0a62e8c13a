"""How long this worker's steps take, as it knows by now: assumed, calibrated, refitted from steps that ran.

1. It begins with `ASSUMED`, an ordinary machine with a small model; nothing is known yet.
2. `reset` takes the calibration's model (`cluster.step_calibration`), once the engine is ready.
3. `observe` books a step that ran: how wrong the prediction for it was, and what it teaches. Every
   `REFIT_EVERY` steps, sooner in the beginning, the model is fitted anew: well below a millisecond. `bias`
   and `spread` are its errors over time, not over steps: a stream's time per token is a sum of seconds.
4. The speed of the latest few steps, against the fitted model, scales it. A machine that others use too is
   half as fast for seconds at a time, and the latest steps of both kinds may be a minute old: a fit of them
   alone was off by 22 to 28 % in the mean on such a machine, with the speed by 13 to 18 %.

Pure and without a clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np

from cluster.step_fit import StepModelFit, median, quantile, weighted_quantile
from cluster.step_model import StepModel, StepWork

ASSUMED: Final = StepModel(
    fixed_s=1e-3, floor_s=8e-3, per_token_s=4e-4, per_context_s=1e-7, per_attention_s=2e-8
)
REFIT_EVERY: Final = 32
_FIRST_REFITS: Final = (8, 16)
_REFIT_ROUNDS: Final = 4
_NUM_ERRORS: Final = 128
_NUM_LATEST: Final = 8  # steps whose middle one says the speed against a model that was fitted anew
_SPEED_SHARE: Final = 1 - 0.5 ** (1 / 4)  # of a step's surprise: half of it is forgotten after four steps
_MOST_SURPRISE: Final = 0.5  # of one step, as a logarithm: a hiccup is not the machine's speed
SAME_SPEED: Final = 0.1  # as a logarithm: by less than that the model does not change between refits


class LiveStepModel:
    """Owns the model; one per worker."""

    def __init__(self, assumed: StepModel = ASSUMED) -> None:
        self.model = assumed
        self.is_measured = False  # by a calibration or by steps that ran
        self.error = 0.0  # median of |actual / predicted - 1| over the latest steps
        self.error_p90 = 0.0  # 90 % quantile of actual / predicted - 1
        self.bias = 0.0  # mean of actual / predicted - 1 over the time of these steps, hiccups cut short
        self.spread = 0.0  # how far above that its 90 % quantile is, over the same time
        self._fit = StepModelFit(assumed)
        self._fitted = assumed  # `model` is this one, slower by `_told_slowness`
        self._slowness = self._told_slowness = 0.0  # logarithms, against the fitted model
        self._latest: deque[tuple[StepWork, float]] = deque(maxlen=_NUM_LATEST)
        self._errors = np.zeros(_NUM_ERRORS)
        self._predicted_s = np.zeros(_NUM_ERRORS)
        self.num_observed = 0  # steps

    def reset(self, model: StepModel) -> None:
        """Go on from this one."""
        self.model = self._fitted = model
        self._slowness = self._told_slowness = 0.0
        self._latest.clear()
        self.is_measured = True
        self._fit = StepModelFit(model)
        self.num_observed = 0

    def observe(self, work: StepWork, seconds: float) -> bool:
        """A step took so long; True: the model has changed."""
        if work.num_tokens <= 0 or not 0 < seconds < math.inf:
            return False
        predicted_s = max(self.model.step_s(work), 1e-9)
        self._errors[self.num_observed % _NUM_ERRORS] = seconds / predicted_s - 1
        self._predicted_s[self.num_observed % _NUM_ERRORS] = predicted_s
        self.num_observed += 1
        self._fit.add(work, seconds)
        self._latest.append((work, seconds))
        surprise = self._slower(work, seconds) - self._slowness
        self._slowness += _SPEED_SHARE * max(-_MOST_SURPRISE, min(surprise, _MOST_SURPRISE))
        if self.num_observed % REFIT_EVERY and self.num_observed not in _FIRST_REFITS:
            if abs(self._slowness - self._told_slowness) <= SAME_SPEED:
                return False
        else:
            self._refit()
        self._tell()
        return True

    def _refit(self) -> None:
        errors = self._errors[: self.num_observed]
        self.error = median(np.abs(errors))
        self.error_p90 = quantile(errors, 0.9)
        predicted_s = self._predicted_s[: self.num_observed]
        cut = np.clip(errors, -_MOST_SURPRISE, _MOST_SURPRISE)
        self.bias = float(cut @ predicted_s / predicted_s.sum())
        self.spread = max(0.0, weighted_quantile(cut, predicted_s, 0.9) - self.bias)
        self._fitted = self._fit.fit(self._fitted, _REFIT_ROUNDS)
        self._slowness = median(np.array([self._slower(*step) for step in self._latest]))
        self.is_measured = True

    def _slower(self, work: StepWork, seconds: float) -> float:
        return math.log(seconds / max(self._fitted.step_s(work), 1e-9))

    def _tell(self) -> None:
        """A speed that is the fitted one within `SAME_SPEED` is the fitted one."""
        self._told_slowness = self._slowness if abs(self._slowness) > SAME_SPEED else 0.0
        self.model = (
            self._fitted.slower(math.exp(self._told_slowness)) if self._told_slowness else self._fitted
        )
