"""How long DistServe's steps of OPT-13B take on A100s of 80 GB: its published coefficients.

Source: github.com/LLMServe/DistServe, `simdistserve/estimators/profile_data` (coefficients in ms, most tokens
of KV) and `simdistserve/{estimators/time_estimator,base/worker}.py` (how they are used). Facts, restated:

    prefill_ms = a + b * sum(n) + c * sum(n^2)  + 1 + (2 + 1e-4 * sum(n))
    decode_ms  = a + b * sum(context) + c * rows    + (2 + 1e-4 * sum(context))

The brackets are what its simulator adds to each step for the control plane, the 1 what it adds to each stage
of a prefill. Decode has two fits, below 95 rows and from there on. DistServe never mixes both in one step, so
it has no figure for one; `MixedSteps` gives the two ends of what one could take.

`learned_model` is what a scheduler plans with: our form of a step's time, fitted to such steps as a worker
fits its own. It errs by up to 11 % (short prompts).

A chunk of n tokens after p costs b * n + c * ((p + n)^2 - p^2): what it adds to the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.step_fit import StepModelFit
from cluster.step_model import StepModel, StepWork, chunk_attention

KV_BYTES_PER_TOKEN = 819_200  # 40 layers x 2 x 5,120 values of 2 bytes
NVLINK_BYTES_S = 300e9  # of an A100, each way
LARGE_ROWS = 95  # from here on the second fit of decode holds
CONTROL_MS, CONTROL_MS_PER_TOKEN, STAGE_MS = 2.0, 1e-4, 1.0

Fit = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Fits:
    """Milliseconds; see the module."""

    prefill: Fit
    decode_small: Fit
    decode_large: Fit
    kv_tokens: int


OPT_13B = {  # by degree of tensor parallelism
    1: Fits(
        (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
        (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
        66_144,
    ),
    2: Fits(
        (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
        (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
        (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
        163_008,
    ),
    4: Fits(
        (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
        (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
        (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
        356_736,
    ),
}


class MixedSteps(Enum):
    """What a step with both takes: both steps in full, or one step that reads the weights once."""

    SUM = "sum"
    FUSED = "fused"  # the longer of the two intercepts, and all that tokens, keys and pairs cost in either


@dataclass(frozen=True, slots=True)
class DistServeTimes:
    """Seconds of a step; `bench.simulator.hardware.StepTimes`."""

    fits: Fits
    mixed: MixedSteps = MixedSteps.SUM

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float:
        step_ms = self._prefill_ms(num_chunk_tokens, attention) + self._decode_ms(num_rows, context)
        if num_rows and num_chunk_tokens and self.mixed is MixedSteps.FUSED:
            step_ms -= min(self.fits.prefill[0] + STAGE_MS, self._decode_fit(num_rows)[0]) + CONTROL_MS
        return step_ms / 1e3

    def growth_s(self, num_rows: int, context: int) -> float:
        """What each step of a run of decode steps takes longer than the last: a row reads a key more."""
        return num_rows * (self._decode_fit(num_rows)[1] + CONTROL_MS_PER_TOKEN) / 1e3

    def _prefill_ms(self, num_tokens: int, attention: float) -> float:
        if not num_tokens:
            return 0.0
        a, b, c = self.fits.prefill
        squares = 2 * attention - num_tokens  # a chunk's pairs are n * p + n * (n + 1) / 2
        return a + STAGE_MS + CONTROL_MS + (b + CONTROL_MS_PER_TOKEN) * num_tokens + c * squares

    def _decode_ms(self, num_rows: int, context: int) -> float:
        if not num_rows:
            return 0.0
        a, b, c = self._decode_fit(num_rows)
        return a + CONTROL_MS + (b + CONTROL_MS_PER_TOKEN) * context + c * num_rows

    def _decode_fit(self, num_rows: int) -> Fit:
        return self.fits.decode_small if num_rows < LARGE_ROWS else self.fits.decode_large


_BASE = StepModel(1e-3, 20e-3, 1e-4, 7e-7, 1.4e-8)  # where no step says anything: of an A100's order
_ROWS, _CONTEXTS = (1, 4, 16, 32, 64, 80), (256, 855, 1600)
_CHUNKS = (32, 128, 256, 512, 1024, 1536, 2048)


def learned_model(times: DistServeTimes) -> StepModel:
    """See the module."""
    fit = StepModelFit(_BASE)
    decodes = [(rows, rows * keys) for rows in _ROWS for keys in _CONTEXTS]
    for rows, context in decodes:
        fit.add(StepWork(rows, context), times.step_s(rows, context, 0, 0.0))
    for chunk in _CHUNKS:
        pairs = chunk_attention(0, chunk)
        for rows in (0, 16, 64):
            context = rows * 855
            seconds = times.step_s(rows, context, chunk, pairs)
            fit.add(StepWork(rows + chunk, context, pairs), seconds)
    return fit.fit()
