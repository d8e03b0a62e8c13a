"""What share of their targets steps aim at, by how far a worker's steps are from what it predicts.

1. `LiveStepModel` knows of its latest steps the mean of actual / predicted - 1, the bias b, and how far the
   90 % quantile is above that, the spread d.
2. `with_margins` gives settings that leave room for both. Where nothing is measured, or steps take what is
   predicted, they are the ones given.

A time per token is a mean, so a single step may be late; what must not happen is that a stream *ends* with a
lag. Let x be the lead of a full worker's tightest stream in units of its target T, s the safety, u the share
of a lead that one step may use (`bank_use`). A step aims at (s + u x) T and takes 1 + b times that, more or
less:

    x' = x + 1 - (1 + b) (s + u x) - noise

Whatever s is, x settles where the mean step takes T. So a margin costs no time per token in the long run, but
for the lead that each stream builds up once; s says how large that is. Noise whose 90 % quantile is d lets x
vary with one of d / sqrt(u (2 - u)). At most one stream in ten ends with a lag if the mean lead is as much:

    s = 1 / (1 + b) - d sqrt(u / (2 - u))

A bias counts in full, a spread by 0.38: steps that aim at their own 90 % quantile would be shorter for
nothing. Errors that last for some steps (a machine has become slower, the model follows) let x vary more;
against those helps how quickly a lag is made up for (`slo_budget.step_budget_s`), not a margin that is there
all the time. So s is never below `_LEAST`.

A margin comes out of what rows leave to prompts, so whoever uses it leaves it out while prompts are late
(`Pacer.end`): those that are overdue have a share of that, and would wait longer.

A gap limit holds for every step: one in a hundred may miss it. Of normal noise that is 1.8 times as far from
the mean as one in ten.

A price of mixed steps below the spread may be what a fit made of noise, and time is lent for its sake
(`slo_budget.lent_budget_s`): it is ignored.

Pure and without a clock.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from cluster.slo_budget import SloSettings

_LEAST: Final = 0.8  # of a target
_ONE_IN_A_HUNDRED: Final = 2.3263 / 1.2816  # quantile of a normal distribution, against one in ten's


def with_margins(settings: SloSettings, bias: float, spread: float) -> SloSettings:
    """`settings` for steps that err so."""
    steps = 1 + max(-0.5, bias)  # as predicted: 1
    used = settings.bank_use
    safety = 1 / steps - spread * math.sqrt(used / (2 - used))
    gap_safety = 1 / (steps + _ONE_IN_A_HUNDRED * spread)
    return replace(
        settings,
        safety=min(settings.safety, max(_LEAST, safety)),
        gap_safety=min(settings.gap_safety, max(_LEAST, gap_safety)),
        price_from=max(settings.price_from, spread),
    )
