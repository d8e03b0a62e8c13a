"""What decodes on a worker, as planning sees it: the batch's load, its tightest stream, how long rows stay.

1. `decode_batch` sums up the rows that could be in the next step, and how long that step may take.
2. `Lives` learns from sequences that end how long they decode and how much they generate; `decode_s` is what
   a prompt's answer is expected to cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from cluster.engine.sequence import Sequence
from cluster.slo_budget import SloSettings, aim_s, bearable_s
from cluster.slo_classes import DecodeBatch, Targets
from cluster.step_model import StepModel

_SMOOTHING: Final = 0.1  # weight of the newest sequence that ended
_ASSUMED_OUTPUT: Final = 128.0  # tokens, before any has ended


def decode_batch(
    rows: Iterable[Sequence],
    now: float,
    model: StepModel,
    settings: SloSettings,
    life_s: float = math.inf,
    mean_output: float = math.inf,
) -> DecodeBatch:
    """Of sequences that decode. `mean_output`: tokens of an answer; one that goes on is expected to have as
    many more, whatever it has had. Those that yield have no say in how long a step may take, nor has one
    whose target this machine could not meet for it alone: nothing would be won by sparing it."""
    num_rows = context = num_yielding = yielding_context = 0
    budget_s = target_s = longest_s = math.inf
    paused_s = 0.0
    slacks_s: list[float] = []  # of the streams that have a say
    before: Targets | None = None  # of the row before, with what comes of them
    target = aimed_s = math.inf
    alone_s = model.fixed_s + max(model.floor_s, model.per_token_s)
    for sequence in rows:
        pace = sequence.pace
        if pace.yields:
            num_yielding += 1
            yielding_context += len(sequence.token_ids)
            paused_s = max(paused_s, now - pace.last_s)
            continue
        num_tokens, targets = len(sequence.token_ids), pace.targets
        num_rows += 1
        context += num_tokens
        if targets is not before:  # mostly they are the worker's own, and all the same
            before, target = targets, min(targets.tpot_s, targets.gap_s)
            aimed_s = aim_s(targets, settings)
        if target < alone_s + model.per_context_s * num_tokens:
            continue
        own_s, slack_s, own_longest_s = pace.bounds(
            num_tokens - sequence.num_initial, sequence.most_left, now, settings, mean_output
        )
        if own_s < math.inf:
            budget_s = min(budget_s, own_s)
            target_s = min(target_s, aimed_s)
            longest_s = min(longest_s, own_longest_s)
            slacks_s.append(slack_s)
    has_target = budget_s < math.inf
    return DecodeBatch(
        num_rows,
        context,
        budget_s if has_target else None,
        target_s if has_target else None,
        num_yielding,
        yielding_context,
        paused_s,
        life_s,
        longest_s,
        bearable_s(slacks_s, settings),
    )


class Lives:
    """How long sequences decode here, and how many tokens they generate: smoothed means."""

    def __init__(self) -> None:
        self.mean_s = math.inf  # not measured yet
        self.mean_output = _ASSUMED_OUTPUT

    def ended(self, sequence: Sequence, now: float) -> None:
        """A sequence is complete."""
        origin_s = sequence.pace.origin_s
        assert origin_s is not None
        self.mean_output += _SMOOTHING * (sequence.num_generated - self.mean_output)
        life_s = max(now - origin_s, 1e-3)
        self.mean_s = life_s if math.isinf(self.mean_s) else self.mean_s + _SMOOTHING * (life_s - self.mean_s)

    def decode_s(self, sequence: Sequence, model: StepModel, kv_tokens: int) -> float:
        """What the answer is expected to cost this worker, of time or KV the scarcer, in seconds.

        `kv_tokens`: the whole pool.
        """
        output = min(self.mean_output, max(sequence.most_left, 1))
        num_tokens = sequence.num_tokens
        step_s = model.per_token_s + model.per_context_s * num_tokens
        held = (num_tokens + output / 2) / kv_tokens
        return output * max(step_s, held * sequence.pace.targets.tpot_s)
