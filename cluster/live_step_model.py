"""How long this worker's steps take, as it knows by now: assumed, calibrated, refitted from steps that ran.

1. It begins with `ASSUMED`, an ordinary machine with a small model; nothing is known yet.
2. `reset` takes the calibration's model (`cluster.step_calibration`), once the engine is ready.
3. `observe` books a step that ran: how wrong the prediction for it was, and what it teaches. Every
   `REFIT_EVERY` steps, sooner in the beginning, the model is fitted anew: well below a millisecond.

Pure and without a clock.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cluster.step_fit import StepModelFit, median, quantile
from cluster.step_model import StepModel, StepWork

ASSUMED: Final = StepModel(
    fixed_s=1e-3, floor_s=8e-3, per_token_s=4e-4, per_context_s=1e-7, per_attention_s=2e-8
)
REFIT_EVERY: Final = 32
_FIRST_REFITS: Final = (8, 16)
_REFIT_ROUNDS: Final = 4
_NUM_ERRORS: Final = 128


class LiveStepModel:
    """Owns the model; one per worker."""

    def __init__(self, assumed: StepModel = ASSUMED) -> None:
        self.model = assumed
        self.is_measured = False  # by a calibration or by steps that ran
        self.error = 0.0  # median of |actual / predicted - 1| over the latest steps
        self.error_p90 = 0.0  # 90 % quantile of actual / predicted - 1
        self._fit = StepModelFit(assumed)
        self._errors = np.zeros(_NUM_ERRORS)
        self._num_observed = 0

    def reset(self, model: StepModel) -> None:
        """Go on from this one."""
        self.model = model
        self.is_measured = True
        self._fit = StepModelFit(model)
        self._num_observed = 0

    def observe(self, work: StepWork, seconds: float) -> bool:
        """A step took so long; True: the model has changed."""
        if work.num_tokens <= 0 or seconds <= 0:
            return False
        self._errors[self._num_observed % _NUM_ERRORS] = seconds / max(self.model.step_s(work), 1e-9) - 1
        self._num_observed += 1
        self._fit.add(work, seconds)
        if self._num_observed % REFIT_EVERY and self._num_observed not in _FIRST_REFITS:
            return False
        errors = self._errors[: self._num_observed]
        self.error = median(np.abs(errors))
        self.error_p90 = quantile(errors, 0.9)
        self.model = self._fit.fit(self.model, _REFIT_ROUNDS)
        self.is_measured = True
        return True
