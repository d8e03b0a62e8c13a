"""What steps take on this machine, measured before anybody waits for one.

1. `shapes` gives a handful of steps: one row and many, short and long contexts, chunks of several lengths,
   small ones first, as far as the pool and the model's length allow.
2. `measure` runs them, again and again while its time lasts; the fastest run of each counts, since whatever
   else the machine does only adds time. A step that would not end in time is not begun. Where others of a
   starting cluster use the cores too, it takes up to `_PATIENCE` times as long rather than learn too little.
3. `fit_calibration` finds the model that explains them, or says why there is none and assumes one: that of an
   ordinary machine, as fast as what was measured. Steps that run later correct it either way.

The rows are nobody's: they read and write blocks that the caller puts back as they were, no block manager
knows of them, and nothing of a step but its time is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.engine.batch import Row, Runner, SampleSpec, StepPlan
from cluster.ids import Attempt, BlockId, RequestId
from cluster.live_step_model import ASSUMED
from cluster.sampling import SamplingParams
from cluster.step_fit import StepModelFit
from cluster.step_model import StepModel, StepWork, chunk_attention

BUDGET_S: Final = 1.0
_PATIENCE: Final = 4
LONG_TOKENS: Final = 1024  # of the longest context
MANY_ROWS: Final = 32
_MAX_RUNS: Final = 3  # of one shape
_MIN_SHAPES: Final = 4  # fewer tell too little
_MAX_ERROR: Final = 0.5  # of the fitted model for what was measured, relative, in the median
_PARAMS: Final = SamplingParams(max_tokens=1, temperature=0.0)

MeasuredStep = tuple[StepWork, float]


@dataclass(frozen=True, slots=True)
class Pool:
    """What calibration may use: blocks [0, `num_blocks`), and sequences of up to `max_tokens`."""

    num_blocks: int
    block_size: int
    max_tokens: int

    @property
    def longest(self) -> int:
        return min(self.max_tokens, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_rows` rows of `num_tokens` tokens after `start`; one token each: they decode."""

    num_rows: int
    num_tokens: int
    start: int

    @property
    def work(self) -> StepWork:
        if self.num_tokens == 1:
            return StepWork(self.num_rows, self.num_rows * (self.start + 1))
        pairs = self.num_rows * chunk_attention(self.start, self.num_tokens)
        return StepWork(self.num_rows * self.num_tokens, 0, pairs)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`problem`: why the model is assumed and not measured, in one sentence; None: it is measured."""

    model: StepModel
    num_shapes: int
    problem: str | None = None


def shapes(pool: Pool) -> list[Shape]:
    """Small ones first; each differs from the others."""
    longest = pool.longest
    long = min(LONG_TOKENS, longest)
    many = min(MANY_ROWS, pool.num_blocks)
    wanted = [
        Shape(1, 1, 0),
        Shape(many, 1, min(pool.block_size, longest) - 1),
        Shape(1, 1, long - 1),
        Shape(1, 64, 0),
        Shape(many, 1, min(512, longest) - 1),
        Shape(1, 64, max(0, long - 64)),
        Shape(1, 256, 0),
        Shape(1, 512, 0),
    ]
    return list(dict.fromkeys(shape for shape in wanted if shape.start + shape.num_tokens <= longest))


def measure(
    runner: Runner, pool: Pool, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter
) -> list[MeasuredStep]:
    """The fastest run of every shape that fits into `budget_s`; the first few within a few times that."""
    began_s = clock()
    fastest: dict[Shape, float] = {}
    per_token_s = 0.0  # of the longest chunk so far
    for _ in range(_MAX_RUNS):
        for shape in shapes(pool):
            least_s = min(fastest.values(), default=0.0)  # no step is shorter than the smallest one
            expected_s = fastest.get(shape, max(least_s, per_token_s * shape.work.num_tokens))
            patience = _PATIENCE if len(fastest) < _MIN_SHAPES else 1
            if clock() - began_s + expected_s > budget_s * patience:
                continue
            seconds = runner.run(_plan(shape, pool)).compute_s
            fastest[shape] = min(seconds, fastest.get(shape, seconds))
            if shape.num_tokens > 1:
                per_token_s = fastest[shape] / shape.work.num_tokens
    return [(shape.work, seconds) for shape, seconds in fastest.items()]


def fit_calibration(steps: Sequence[MeasuredStep]) -> Calibration:
    """The model of these steps, or the assumed one as fast as they were."""
    usable = [(work, seconds) for work, seconds in steps if seconds > 0]
    if not usable:
        return Calibration(ASSUMED, 0, "no step of the calibration ran")
    scale = statistics.median(seconds / ASSUMED.step_s(work) for work, seconds in usable)
    assumed = ASSUMED.slower(scale)
    if len(usable) < _MIN_SHAPES:
        problem = f"too few kinds of steps ran in the time there was ({len(usable)})"
        return Calibration(assumed, len(usable), problem)
    fit = StepModelFit(assumed)
    for work, seconds in usable:
        fit.add(work, seconds)
    model = fit.fit()
    error = statistics.median(abs(seconds / model.step_s(work) - 1) for work, seconds in usable)
    if error > _MAX_ERROR or model.per_token_s <= 0:
        problem = f"the steps it ran follow no model (error {error:.0%}, {model.per_token_s:.1e} s per token)"
        return Calibration(assumed, len(usable), problem)
    return Calibration(model, len(usable))


def _plan(shape: Shape, pool: Pool) -> StepPlan:
    """Each row has the pool's blocks from another one on, so that rows of one step write different blocks."""
    end = shape.start + shape.num_tokens
    num_blocks = -(-end // pool.block_size)
    tokens = [0] * shape.num_tokens
    sample = SampleSpec(params=_PARAMS, prompt_ids=tokens, output_ids=()) if shape.num_tokens == 1 else None
    rows = [
        Row(
            request=RequestId(f"calibration-{index}"),
            attempt=Attempt(1),
            token_ids=tokens,
            start=shape.start,
            block_ids=[BlockId((index + block) % pool.num_blocks) for block in range(num_blocks)],
            sample=sample,
        )
        for index in range(shape.num_rows)
    ]
    return StepPlan(rows=tuple(rows))
