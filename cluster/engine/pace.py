"""What an attempt is promised, in this worker's clock, and how far it is ahead of that.

1. The router says how long from now the attempt's first token is due (`SloTargets`); `pace_of` turns that
   into this worker's time. Without it the worker's own targets hold, from now.
2. `first_token`: the stream's clock starts. TPOT is a mean from the first token on, so token k is due
   k TPOTs after it. On a later attempt the client's clock runs already: its next token was due at `due_s`.
3. `token` after each further one; `budget_s` says how long the next step may take for this stream's sake.

A first token that came late cannot be made up for: such a stream yields to those that are in time, as batch
work does. One that lags more than its remaining tokens can make up for asks for nothing any more.
"""

from __future__ import annotations

import math

from cluster.slo_budget import SloSettings, step_budget_s
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.wire.messages import PriorityClass, SloTargets

_MOST_CATCH_UP = 0.5  # share of a TPOT that each remaining token can make up for


class Pace:
    """Of one attempt on one worker; its scheduler is the only writer."""

    __slots__ = ("due_s", "is_batch", "is_resumed", "last_s", "origin_s", "targets", "yields")

    def __init__(
        self, targets: Targets, due_s: float, *, is_batch: bool = False, is_resumed: bool = False
    ) -> None:
        """`is_resumed`: the client has had tokens of an earlier attempt."""
        self.targets = targets
        self.due_s = due_s  # of this attempt's first token
        self.is_batch = is_batch
        self.is_resumed = is_resumed
        self.origin_s: float | None = None  # when token 0 of this attempt came, or was due
        self.last_s = 0.0  # latest token
        self.yields = is_batch  # it need not be in every step; so is one whose first token was late

    def first_token(self, now: float) -> None:
        """Token 0 of this attempt is there."""
        self.last_s = now
        if self.is_resumed:
            self.origin_s = self.due_s
        else:
            self.origin_s = now
            self.yields = self.is_batch or now > self.due_s

    def token(self, now: float) -> None:
        """One more token is there."""
        self.last_s = now

    def slack_s(self, num_generated: int, now: float) -> float:
        """From now until its next token is due; `num_generated` tokens of this attempt are there."""
        assert self.origin_s is not None, "its stream has not begun"
        return self.origin_s + num_generated * self.targets.tpot_s - now

    def budget_s(
        self,
        num_generated: int,
        num_left: int,
        now: float,
        settings: SloSettings,
        expected_left: float = math.inf,
    ) -> float:
        """How long a step that begins now may take; `num_generated` tokens of this attempt are there, at most
        `num_left` follow, `expected_left` as far as anybody knows. Inf: as long as it likes."""
        return self.bounds(num_generated, num_left, now, settings, expected_left)[0]

    def bounds(
        self, num_generated: int, num_left: int, now: float, settings: SloSettings, expected_left: float
    ) -> tuple[float, float, float]:
        """`budget_s`, `slack_s` and `longest_s`."""
        targets, slack_s, longest_s = self.targets, self.slack_s(num_generated, now), self.targets.gap_s
        if longest_s != math.inf:
            longest_s = self.longest_s(now, settings)
        if -slack_s > _MOST_CATCH_UP * targets.tpot_s * num_left:
            return math.inf, slack_s, longest_s
        budget_s = step_budget_s(targets, slack_s, settings, min(num_left, expected_left))
        return min(budget_s, longest_s), slack_s, longest_s

    def longest_s(self, now: float, settings: SloSettings) -> float:
        """How long a step that begins now may take for the sake of gaps."""
        gap_s = self.targets.gap_s
        return gap_s if math.isinf(gap_s) else max(0.0, gap_s * settings.gap_safety - (now - self.last_s))


def pace_of(slo: SloTargets | None, defaults: Targets, now: float, *, is_resumed: bool = False) -> Pace:
    """Of an attempt that arrives now."""
    if slo is None:
        return Pace(defaults, now + defaults.ttft_s, is_resumed=is_resumed)
    targets = Targets(defaults.ttft_s, slo.tpot_s, math.inf if slo.gap_s is None else slo.gap_s)
    return Pace(
        targets,
        now + slo.ttft_deadline_in_s,
        is_batch=slo.priority_class is PriorityClass.BATCH,
        is_resumed=is_resumed,
    )


def unpromised(now: float) -> Pace:
    """Of a sequence that nobody waits for in particular."""
    return pace_of(None, DEFAULT_TARGETS, now)
