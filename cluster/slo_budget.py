"""How long a worker's next step may take, for the sake of the streams in it.

1. `step_budget_s`: by one stream's slack. The tightest stream decides.
2. `lent_budget_s`: where a step with decode rows and chunks costs more than both (`StepModel.mixed_s`). All
   streams but a few decide (`bearable_s`).

Pure and without a clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.slo_classes import DecodeBatch, Targets
from cluster.step_model import StepModel, StepWork


@dataclass(frozen=True, slots=True)
class SloSettings:
    safety: float = 0.985  # share of the TPOT target that steps aim at ...
    gap_safety: float = 0.985  # ... and of the gap limit; see `cluster.step_margin`
    max_idle_step_s: float = 0.05  # step without streams that have a target ...
    fixed_share: float = 1 / 16  # ... or longer: what each step takes, whatever is in it, is no more of it
    min_share: float = 0.03  # of a step, assumed for prompts when decode leaves less
    yielding_load: float = 0.25  # share of a step that rows which yield may take; more prompts do not begin
    splits_yielding: bool = False  # rows that yield are in a step one by one, not all or none
    aged_share: float = 0.01  # of the time, for those that are not on time
    late_share: float = 0.0  # of what those on time leave: prompts' before rows that yield
    overdue_s: float = math.inf  # a prompt so late has a share before those on time ...
    overdue_share: float = 0.0  # ... of what rows with a target leave
    bank_use: float = 0.25  # share of a stream's lead that one step may use
    longest: float = math.inf  # TPOTs that a step may take at most, whatever the lead: readers see gaps too
    catch_up: float = 0.1  # share of a stream's lag that one step makes up for, at least ...
    lag_share: float = 1 / 16  # ... and so that it is gone within this share of the tokens still expected
    short_slack: float = 0.0  # share of others' slack that a shorter prompt may use to go first
    price_from: float = 0.05  # of a TPOT: what a mixed step costs more than its parts, if less, is ignored
    may_lag: float = 0.1  # share of the streams that a step which pays it may leave behind ...
    worth: float = 3.0  # ... for chunks worth so many times the price
    max_pause_s: float = math.inf  # of those that are not on time, the oldest prompt and the rows that yield
    max_chunk_tokens: int = sys.maxsize  # prompt tokens in a step, at most, whatever the budget
    max_looked_at: int = 256
    max_late_looked_at: int = 16


def step_budget_s(
    targets: Targets, slack_s: float, settings: SloSettings, num_left: float = math.inf
) -> float:
    """How long the next step may take; `num_left`: tokens that the stream is expected to have yet.

    A stream in time is due one TPOT from now. One with a lead allows for more, one that lags for less: part
    of the difference is used per step, since the mean counts. Never above `longest` and the gap limit, nor
    below half a TPOT.

    A prompt that was computed elsewhere joins when the step in flight ends, so it begins with a lag of up to
    a whole step. A stream that ends before it has caught up has missed its target, and nobody knows when it
    ends: a lag is gone within `lag_share` of the tokens still expected, so that few end before (of those that
    missed their TPOT on a full live pair, seven in ten had not caught up). For answers
    of hundreds of tokens that is slow, for those of a dozen the next token comes when it is due. What quick
    steps cost is what each step takes whatever is in it: rows wait for fewer others, and leave sooner.
    """
    tpot_s = targets.tpot_s * settings.safety
    lead_s = slack_s - targets.tpot_s
    if math.isinf(lead_s):
        budget_s = max(tpot_s, settings.max_idle_step_s)
    else:
        share = settings.bank_use if lead_s > 0 else _catch_up(num_left, settings)
        budget_s = tpot_s + lead_s * share
        budget_s = min(max(budget_s, 0.5 * tpot_s), settings.longest * tpot_s)
    return min(budget_s, targets.gap_s * settings.gap_safety)


def aim_s(targets: Targets, settings: SloSettings) -> float:
    """Of a step, for a stream in time."""
    return min(targets.tpot_s * settings.safety, targets.gap_s * settings.gap_safety)


def _catch_up(num_left: float, settings: SloSettings) -> float:
    """Share of a lag that one step makes up for."""
    return min(1.0, max(settings.catch_up, 1 / max(settings.lag_share * num_left, 1.0)))


def lent_budget_s(
    model: StepModel,
    decode: DecodeBatch,
    budget_s: float,
    tpot_s: float,
    work_s: float,
    settings: SloSettings,
) -> float:
    """The budget of a step, `budget_s` otherwise, where a step with both rows and chunks has a price.

    Many short chunks would pay it many times, and leave nothing for tokens. So one step may be longer, at
    the expense of all streams but a few: those that began lately have no lead yet, but time to make up for
    it, and what counts is how many end behind, no more than are behind at any time. If even so there is no
    room for chunks worth the price (or for all that waits, `work_s`), the step has none, and the streams
    gain by it.
    """
    price_s = model.mixed_s
    alone_s = model.step_s(StepWork(decode.num_rows, decode.context))
    lent_s = max(budget_s, min(decode.bearable_s, decode.longest_s, settings.longest * tpot_s))
    has_room = lent_s >= alone_s + price_s + min(settings.worth * price_s, work_s)
    return lent_s if has_room else min(budget_s, alone_s)


def bearable_s(slacks_s: Iterable[float], settings: SloSettings) -> float:
    """How long a step may take that leaves no more than `may_lag` of the streams behind.

    `slacks_s`: from now until each is due. 0 without any.
    """
    ordered = sorted(slacks_s)
    return ordered[int(settings.may_lag * len(ordered))] if ordered else 0.0
