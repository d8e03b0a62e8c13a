"""How a worker sizes its steps: its live step model and the scheduler of its prompts, kept together.

1. A prompt waits as a `WaitingPrompt` in `Pacer.prompts`, an `SloScheduler`.
2. The role's scheduler plans a step with it and says `begin(work, now)`.
3. `end(compute_s, now)`: what the step took, as streams felt it, goes to the model; when the model has
   changed, the next plan uses it, and aims as far below the targets as the model errs, unless prompts
   are late (`cluster.step_margin`). `drop` forgets a step that failed.
4. `gauges` is what routers get to know of all this.

Both roles share it; it decides nothing of its own.
"""

from __future__ import annotations

import math

import msgspec

from cluster.engine.sequence import Sequence
from cluster.live_step_model import LiveStepModel
from cluster.role_config import WorkerConfig
from cluster.slo_classes import AGED_SHARE, LATE_SHARE, OVERDUE_SHARE, Targets
from cluster.slo_schedule import SloScheduler, SloSettings
from cluster.step_margin import with_margins
from cluster.step_model import StepModel, StepWork
from cluster.wire.messages import WorkerLoad

_MEASURED = 32  # steps after which their errors say something
_RATE_S = 5.0  # over which the rate of prompts that are not on time is smoothed
LATE_RESERVE = 0.15  # of the KV, left to prompts that are on time while others hold some


def default_targets(config: WorkerConfig) -> Targets:
    """Of requests that bring none."""
    return Targets(
        config.slo_ttft_s, config.slo_tpot_s, math.inf if config.slo_gap_s is None else config.slo_gap_s
    )


def live_settings(targets: Targets, max_chunk_tokens: int) -> SloSettings:
    """Of a worker that serves; `max_chunk_tokens` bounds a step's prompt tokens, whatever the model says.

    Without streams a step may take a twentieth of a TTFT: whoever arrives meanwhile waits no longer. Late
    rows and prompts take all that the others leave: no time is kept from them while a worker could compute.
    Prompts come first there, and one that has waited four times its target goes before those on time too,
    in a share that leaves them some: whoever is late waits a few times as long as others, not ten times.
    """
    return SloSettings(
        max_idle_step_s=targets.ttft_s / 20,
        longest=2.0,
        aged_share=AGED_SHARE,
        late_share=LATE_SHARE,
        overdue_s=3 * targets.ttft_s,
        overdue_share=OVERDUE_SHARE,
        yielding_load=math.inf,
        splits_yielding=True,
        short_slack=0.5,
        max_pause_s=0.5,
        max_chunk_tokens=max_chunk_tokens,
    )


class WaitingPrompt(msgspec.Struct, eq=False):
    """A sequence whose prompt is to be computed here, as `cluster.slo_classes.Prompt`."""

    sequence: Sequence
    deadline_s: float
    is_batch: bool = False
    kv_tokens: int = 0  # that it takes when it begins, in whole blocks; 0: it holds them
    decode_s: float = 0.0
    load_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens

    @property
    def num_computed(self) -> int:
        return self.sequence.num_computed

    @property
    def new_kv_tokens(self) -> int:
        return 0 if self.sequence.block_ids else self.kv_tokens


class Pacer:
    """Owns the step model and the waiting prompts of one worker."""

    def __init__(self, targets: Targets, max_chunk_tokens: int) -> None:
        self._plain = self._roomy = live_settings(targets, max_chunk_tokens)  # roomy: with margins
        self.steps = LiveStepModel()
        self.prompts: SloScheduler[WaitingPrompt] = SloScheduler(self.steps.model, targets, self._plain)
        self._step: tuple[StepWork, float] | None = None  # in flight, and when it began
        self._late_s: float | None = None  # work of prompts not on time in that step; None: none waited
        self._late_rate = 0.0  # of the time in which such prompts wait, what they get: a sum with ...
        self._late_weight = 0.0  # ... weights that come to this

    @property
    def model(self) -> StepModel:
        return self.steps.model

    @property
    def settings(self) -> SloSettings:
        """As of the next plan."""
        return self.prompts.settings

    def calibrated(self, model: StepModel) -> None:
        """What this machine takes, measured before anything ran."""
        self.steps.reset(model)
        self.prompts.model = model

    def begin(self, work: StepWork, now: float) -> None:
        self._step = work, now
        self._late_s = self.prompts.planned_late_s if len(self.prompts) else None

    def end(self, compute_s: float, now: float, *, is_typical: bool = True) -> None:
        """The step is done; streams felt what it computed and what it took to hand it over. One that went on
        by itself began before `begin` heard of it. What it waited for the loop then is in the time of the
        step before: `compute_s` has none of it. `is_typical`: there was no more in it than `begin` said."""
        assert self._step is not None
        (work, began_s), self._step = self._step, None
        if self._late_s is not None and now > began_s:
            kept = math.exp((began_s - now) / _RATE_S)
            self._late_rate = kept * self._late_rate + (1 - kept) * self._late_s / (now - began_s)
            self._late_weight = kept * self._late_weight + (1 - kept)
        if is_typical and self.steps.observe(work, max(compute_s, now - began_s)):
            self._take_model()
        # A margin comes out of what is left to prompts: while some are late, there is nothing to spare.
        self.prompts.settings = self._plain if self.prompts.num_late else self._roomy

    def go_on(self, compute_s: float, work: StepWork, now: float, *, is_typical: bool = True) -> None:
        """`end` of a step, and `begin` of `work`, which began without a word: at half the price where no
        prompt waits, and so none is late."""
        if self._late_s is not None or len(self.prompts):
            self.end(compute_s, now, is_typical=is_typical)
            self.begin(work, now)
            return
        assert self._step is not None
        (before, began_s), self._step = self._step, (work, now)
        if is_typical and self.steps.observe(before, max(compute_s, now - began_s)):
            self._take_model()
            self.prompts.settings = self._roomy

    def _take_model(self) -> None:
        steps = self.steps
        self.prompts.model = steps.model
        if steps.num_observed >= _MEASURED:
            self._roomy = with_margins(self._plain, steps.bias, steps.spread)

    def drop(self) -> None:
        """The step failed: it says nothing."""
        self._step = None

    @property
    def late_rate(self) -> float:
        """Prefill seconds that prompts which are not on time got per second while some waited; 0: not
        measured. Nothing is said before half of `_RATE_S` has been seen."""
        return self._late_rate / self._late_weight if self._late_weight > 0.4 else 0.0

    def gauges(self, load: WorkerLoad) -> WorkerLoad:
        """`load` with what concerns steps and prompts."""
        steps = self.steps
        return msgspec.structs.replace(
            load,
            step_model=steps.model if steps.is_measured else None,
            step_error=steps.error,
            step_error_p90=steps.error_p90,
            on_time_prefill_s=self.prompts.work_s if len(self.prompts) else 0.0,
            late_prefill_s=self.prompts.late_s if len(self.prompts) else 0.0,
            queued_load_s=self.prompts.load_s if len(self.prompts) else 0.0,
            late_rate=self.late_rate,
            on_time_share=self.prompts.on_time_share if len(self.prompts) else 1.0,
        )
