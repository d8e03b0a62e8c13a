"""How many workers of a pool of equals only prefill, the others only decoding, if mixed steps have a price.

1. `ended` for each answer: its lengths, and what runs. True: `num_prefill` is another one now.
2. `assigned` says which workers these are.

Where chunks ride beside rows for nothing, every worker does both. Where a mixed step costs more than its
parts, rows gather on few workers by themselves (`router.reckoning`), but what they find one by one is not
what serves most: a burst puts a row on a worker that computes prompts, whose prompts go to one that decodes,
where they make rows late. So where `router.planner` predicts that a split serves two fifths more than all
doing both, workers are dedicated.

Of splits that serve nearly as much, the one with most workers that decode is taken: a worker too few there is
felt by all rows, one too few for prompts by those that cost most. Lengths are those of answers that ended:
the first of them are short, all are old. So nothing is decided before several have ended for each that runs,
and when rows read more than those that only decode have room for, one more decodes at once. Where neither
gaps nor first tokens leave room for a mixed step, half of the workers prefill from the beginning: prompts
that began among rows would have to end there.

Pools of several kinds separate by what each is comparatively good at, without this. Live, roles are processes
(`router.role_shifts`).

Pure; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.slo_budget import SloSettings
from cluster.slo_classes import Targets
from router.planner import Kind, KindWork, Roles, far_step_s, predicted_rate, work_of

MEMORY = 512  # answers
EVERY = 64  # answers from one decision to the next
RELIEVED = 8  # answers from one look at what rows read to the next
BEGUN = 4.0  # answers that ended for each that runs, at least
GAIN = 1.4  # predicted, for dedication to pay ...
KEEP = 1.05  # ... and for another split
NEARLY = 0.9  # of the best split's rate
BURST = 1.3  # of what there is room for: rows that read more end a split with one worker left to prefill


class Dedication:
    """Of the workers of `kind`. Owns the latest answers' lengths, and what was decided."""

    def __init__(self, kind: Kind, targets: Targets) -> None:
        self._kind = kind
        self._targets = targets
        step_s = min(targets.tpot_s, targets.gap_s)
        self.has_price = (
            kind.count > 1 and kind.mixed_s > SloSettings().price_from * step_s
        )  # else nobody asks
        self._lengths: list[tuple[int, int]] = []
        self._num = 0
        self._room = 0.0  # keys that rows may read on a worker that only decodes
        weights_s = kind.model.fixed_s + kind.model.floor_s
        longest_s = min(targets.gap_s, targets.ttft_s / 2)
        self._mixes = not self.has_price or weights_s + 2 * kind.mixed_s <= longest_s  # sometimes
        self.num_prefill = None if self._mixes else kind.count // 2  # None: all do both

    def ended(self, num_prompt: int, num_output: int, num_running: float, context: float) -> bool:
        """An answer. `context`: keys that all rows read now."""
        if not self.has_price:
            return False
        if len(self._lengths) < MEMORY:
            self._lengths.append((num_prompt, num_output))
        else:
            self._lengths[self._num % MEMORY] = num_prompt, num_output
        self._num += 1
        was = self.num_prefill
        if self._num % EVERY == 0 and self._num >= BEGUN * num_running:
            self._decide(context)
        elif was is not None and self._num % RELIEVED == 0 and self._is_overfull(was, context):
            self.num_prefill = (was - 1 or None) if self._mixes else max(1, was - 1)
        return self.num_prefill != was

    def _is_overfull(self, num_prefill: int, context: float) -> bool:
        burst = BURST if num_prefill == 1 else 1.0
        return context > burst * self._room * (self._kind.count - num_prefill)

    def _decide(self, context: float) -> None:
        kind = self._kind
        (work,) = work_of(self._lengths, [kind], self._targets, share_served=1.0)
        left_s = far_step_s(self._targets) - kind.model.fixed_s - kind.model.floor_s - work.margin_s
        self._room = max(0.0, left_s) / max(kind.model.per_context_s, 1e-12)
        rates = {
            num_prefill: self._rate(Roles(num_prefill, kind.count - num_prefill, 0), work)
            for num_prefill in range(1, kind.count)
            if not self._is_overfull(num_prefill, context)
        }
        most, now = max(rates.values(), default=0.0), self.num_prefill
        if self._mixes:
            both = self._rate(Roles(0, 0, kind.count), work)
            if not most or most < (GAIN if now is None else 1.0) * both:
                self.num_prefill = None
                return
        elif not most:
            return
        best = min(num_prefill for num_prefill, rate in rates.items() if rate >= NEARLY * most)
        if now is None or best < now or rates[best] > KEEP * rates.get(now, 0.0):
            self.num_prefill = best

    def _rate(self, roles: Roles, work: KindWork) -> float:
        return predicted_rate([self._kind], [roles], [work], self._targets)


def assigned(num_prefill: int, rows: Sequence[float], prefilling: Sequence[bool]) -> list[bool]:
    """Per worker whether it only prefills: those that do, then those with the fewest rows."""
    order = sorted(range(len(rows)), key=lambda index: (not prefilling[index], rows[index]))
    chosen = set(order[:num_prefill])
    return [index in chosen for index in range(len(rows))]
