"""Roles of workers: which only prefill, only decode, or do both. By predicted goodput, with hysteresis.

1. A `Workload` sums up recent requests: their prefill and decode work, the costliest tenth left out, since a
   tenth may miss its targets.
2. `best_roles` tries the splits of each kind and predicts the rate each would sustain.
3. `Planner.decide` changes what is only if the gain has been above `gain` for `patience` decisions in a row.

Algorithm: a worker has `step - fixed` seconds of each step for tokens. One that decodes may not spend more on
reading KV than its target leaves beside the weights. One that does both has chunks in every step, or, where
that costs (`mixed_s`), a few longer ones, as long as gaps, first tokens and what rows gain allow, and reads
its weights for rows alone in all others, as its scheduler does (`cluster.slo_budget`); if none is long
enough, prompts and rows take turns. Rows whose prompts were computed elsewhere begin late: steps must be so
much shorter that few answers end before that is made up for (`handoff_margin_s`), and a hand-off must fit
into a gap (`far_step_s`); where no step is short enough, nothing is handed over. Rows come and go at random,
so one that only decodes has fewer than fit. A rate is feasible if decode fits into the workers that may
decode, taken in order of comparative advantage (decode seconds over prefill seconds, least first), and
prefill into what is left of those that may prefill. It is found by bisection.

Order: among equal predictions the split with the most workers that do both.

When nothing fits (no kind can meet the target): all do both, predicted rate 0; `decide` changes nothing.

Bounds: O(splits x kinds x 40); pure, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cluster.slo_budget import SloSettings
from cluster.slo_classes import Targets
from cluster.step_model import StepModel, chunk_attention


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    count: int
    model: StepModel
    mixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Roles:
    """Of one kind."""

    num_prefill: int
    num_decode: int
    num_both: int


@dataclass(frozen=True, slots=True)
class KindWork:
    """Mean per request, on one kind, in seconds."""

    prefill_s: float
    decode_s: float
    reading_s: float  # the part of decode that reads KV
    num_tokens: float  # of an answer
    spread: float  # of the keys that rows read: mean of the squares over square of the mean
    margin_s: float  # see `handoff_margin_s`


@dataclass(frozen=True, slots=True)
class RolePlan:
    roles: tuple[Roles, ...]  # by kind
    rate: float  # requests per second, the tenth that may miss included


SHARE_SERVED = 0.9
MAY_MISS = 0.07  # share of answers whose prompts were computed elsewhere
HANDOFF_S = 0.002
_SETTINGS = SloSettings()
NO_RATE = 1e-6  # requests per second: none, for who searches by bisection


def work_of(
    requests: Sequence[tuple[int, int]],
    kinds: Sequence[Kind],
    targets: Targets,
    share_served: float = SHARE_SERVED,
) -> tuple[KindWork, ...]:
    """Per kind; the costliest (on the first kind) are left out, and all counted."""
    first = kinds[0].model
    ordered = sorted(requests, key=lambda one: sum(_costs(first, *one)[:2]))
    served = ordered[: max(1, int(share_served * len(ordered)))]
    answers = [num_output for _, num_output in ordered]
    num_tokens = sum(answers) / len(answers)
    rows = [(answer, num_prompt + answer / 2) for num_prompt, answer in ordered]  # steps, keys
    num_keys = sum(steps * keys for steps, keys in rows)
    spread = sum(answers) * sum(steps * keys * keys for steps, keys in rows) / num_keys**2
    works = []
    for kind in kinds:
        sums = [
            sum(parts) / len(ordered)
            for parts in zip(*(_costs(kind.model, *one) for one in served), strict=True)
        ]
        margin_s = handoff_margin_s(answers, kind.model, targets.tpot_s)
        works.append(KindWork(sums[0], sums[1], sums[2], num_tokens, spread, margin_s))
    return tuple(works)


def _costs(model: StepModel, num_prompt: int, num_output: int) -> tuple[float, float, float]:
    reading_s = num_output * model.per_context_s * (num_prompt + num_output / 2)
    prefill_s = model.per_token_s * num_prompt + model.per_attention_s * chunk_attention(0, num_prompt)
    return prefill_s, num_output * model.per_token_s + reading_s, reading_s


def handoff_margin_s(answers: Sequence[int], model: StepModel, tpot_s: float) -> float:
    """By how much steps must be shorter than the target, so that no more than `MAY_MISS` of the answers miss
    it for beginning late: by the hand-off, and a part of a step in flight, any as likely. Infinite if an
    empty worker's steps are too long for that."""
    step_s = model.fixed_s + model.floor_s
    most_s = tpot_s - step_s
    num_gaps = [answer - 1 for answer in answers if answer > 1]

    def missing(margin_s: float) -> float:
        in_time = sum(min(1.0, max(0.0, (margin_s * gaps - HANDOFF_S) / step_s)) for gaps in num_gaps)
        return (len(num_gaps) - in_time) / len(answers)

    if most_s <= 0 or missing(most_s) > MAY_MISS:
        return math.inf
    low_s, high_s = 0.0, most_s
    for _ in range(20):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if missing(middle_s) > MAY_MISS else (low_s, middle_s)
    return high_s


def predicted_rate(
    kinds: Sequence[Kind], roles: Sequence[Roles], works: Sequence[KindWork], targets: Targets
) -> float:
    """Requests per second that these roles sustain."""
    low, high = 0.0, 1.0
    while _is_feasible(high, kinds, roles, works, targets):
        low, high = high, high * 2
    for _ in range(40):
        middle = (low + high) / 2
        if _is_feasible(middle, kinds, roles, works, targets):
            low = middle
        else:
            high = middle
    return low


def _is_feasible(
    rate: float, kinds: Sequence[Kind], roles: Sequence[Roles], works: Sequence[KindWork], targets: Targets
) -> bool:
    """With the workers that only prefill, or without them: answers may be too short for a hand-off."""
    with_them = sum(role.num_prefill for role in roles) > 0
    return any(
        _serves(rate, kinds, roles, works, targets, far) for far in ((True, False) if with_them else (False,))
    )


def _serves(
    rate: float,
    kinds: Sequence[Kind],
    roles: Sequence[Roles],
    works: Sequence[KindWork],
    targets: Targets,
    far: bool,
) -> bool:
    """`far`: prompts are computed by workers that only prefill, too."""
    step_s = min(targets.tpot_s, targets.gap_s)
    places: list[tuple[float, int, bool]] = []  # (decode seconds per prefill second, kind, both)
    for at, (kind, role) in enumerate(zip(kinds, roles, strict=True)):
        if kind.model.fixed_s + kind.model.floor_s >= step_s:
            continue
        ratio = works[at].decode_s / works[at].prefill_s
        places += [(ratio - 1e9, at, False)] if role.num_decode else []  # nothing else to do there
        places += [(ratio, at, True)] if role.num_both else []
    undone = rate  # requests per second still to be decoded
    prefill = 0.0
    for kind, role, work in zip(kinds, roles, works, strict=True):
        busy = max(0.0, 1 - kind.model.fixed_s / max(targets.ttft_s / 4, step_s))
        prefill += role.num_prefill * busy / work.prefill_s if far else 0.0
    for _, at, is_both in sorted(places):
        if is_both:
            count = roles[at].num_both
            done, computed = _both(kinds[at], works[at], undone / count, targets, far)
            undone -= done * count
            prefill += computed * count
        else:
            undone -= min(undone, roles[at].num_decode * _decodes(kinds[at], works[at], targets))
    return undone <= 1e-9 * rate and prefill >= rate


def far_step_s(targets: Targets) -> float:
    """Of rows whose prompts were computed elsewhere: a hand-off, the rest of a step in flight and one more
    must fit into a gap."""
    return min(targets.tpot_s, (targets.gap_s * _SETTINGS.gap_safety - HANDOFF_S) / (2 - MAY_MISS))


def _decodes(kind: Kind, work: KindWork, targets: Targets) -> float:
    """Requests per second of a worker that only decodes."""
    model, step_s = kind.model, far_step_s(targets)
    weights_s = model.fixed_s + model.floor_s
    left_s = step_s - weights_s - work.margin_s
    if left_s <= 0:
        return 0.0
    row_s = max(work.reading_s / work.num_tokens, 1e-12)
    most = left_s / row_s
    half = work.spread / 2
    rows = most + half - math.sqrt(2 * half * most + half * half)  # a standard deviation more still fits
    within = (step_s - work.margin_s - model.fixed_s) / step_s / work.decode_s
    return min(rows / (work.num_tokens * (weights_s + rows * row_s)), within)


def _both(kind: Kind, work: KindWork, wanted: float, targets: Targets, far: bool) -> tuple[float, float]:
    """Of a worker that does both: requests per second decoded, of so many `wanted`, and prompts computed."""
    model, step_s = kind.model, min(targets.tpot_s, targets.gap_s)
    weights_s = model.fixed_s + model.floor_s
    most_s = max(0.0, step_s - work.margin_s if far else step_s)
    room = max(0.0, most_s - weights_s) / step_s
    limit = max(room / max(work.reading_s, 1e-12), _decodes(kind, work, targets))
    mixed = max(0.0, most_s - model.fixed_s - kind.mixed_s) / step_s  # all steps have chunks
    done = min(wanted, limit, mixed / work.decode_s)
    ways = [(done, max(0.0, mixed - done * work.decode_s) / work.prefill_s)]
    if kind.mixed_s > _SETTINGS.price_from * step_s:  # few have
        done = min(wanted, limit)
        chunk_s = min(_SETTINGS.worth * kind.mixed_s, work.prefill_s)
        if weights_s + kind.mixed_s + chunk_s <= _longest_s(kind, work, targets):
            share = max(0.0, room - done * work.reading_s) * _SETTINGS.worth / (_SETTINGS.worth + 1)
        else:  # prompts and rows take turns, within the first token's target; prompts have half at best
            share = max(0.0, 1 - work.num_tokens * weights_s / (targets.ttft_s / 2)) / 2
        ways.append((done, share / work.prefill_s))
    return max(ways)


def _longest_s(kind: Kind, work: KindWork, targets: Targets) -> float:
    """Of a step with rows: for the sake of gaps, of first tokens that wait for it and of what rows can gain
    until then, half of what they gain while they are there."""
    gained_s = work.num_tokens * (targets.tpot_s - kind.model.fixed_s - kind.model.floor_s)
    return min(targets.gap_s * _SETTINGS.gap_safety, targets.ttft_s / 2, gained_s / 2)


def best_roles(
    kinds: Sequence[Kind],
    requests: Sequence[tuple[int, int]],
    targets: Targets,
    *,
    may_only_decode: bool = True,
) -> tuple[RolePlan, RolePlan]:
    """(the best, all doing both)."""
    works = work_of(requests, kinds, targets)
    both = tuple(Roles(0, 0, kind.count) for kind in kinds)
    found = plain = RolePlan(both, predicted_rate(kinds, both, works, targets))
    for roles in product(*(_splits(kind.count, may_only_decode) for kind in kinds)):
        rate = predicted_rate(kinds, roles, works, targets)
        if rate > found.rate * (1 + 1e-6):
            found = RolePlan(roles, rate)
    return found, plain


def _splits(count: int, may_only_decode: bool) -> list[Roles]:
    """From all doing both down, in at most nine steps per role."""
    steps = sorted({round(count * share / 8) for share in range(9)})
    decode = steps if may_only_decode else [0]
    return [Roles(p, d, count - p - d) for p in steps for d in decode if p + d <= count]


@dataclass(frozen=True, slots=True)
class PlannerState:
    """`since`: decisions in a row for which `candidate` was better."""

    roles: tuple[Roles, ...]
    candidate: tuple[Roles, ...] | None = None
    since: int = 0


@dataclass(frozen=True, slots=True)
class Planner:
    gain: float = 0.05  # predicted, for a change to pay
    patience: int = 3
    may_only_decode: bool = True  # else workers that decode may prefill, too

    def decide(
        self,
        state: PlannerState,
        kinds: Sequence[Kind],
        requests: Sequence[tuple[int, int]],
        targets: Targets,
    ) -> PlannerState:
        """The next state; its roles differ from the present ones only after `patience` decisions."""
        best, _ = best_roles(kinds, requests, targets, may_only_decode=self.may_only_decode)
        now = predicted_rate(kinds, state.roles, work_of(requests, kinds, targets), targets)
        if best.roles == state.roles or best.rate < max(NO_RATE, now * (1 + self.gain)):
            return PlannerState(state.roles)
        since = state.since + 1 if state.candidate == best.roles else 1
        if since >= self.patience:
            return PlannerState(best.roles)
        return PlannerState(state.roles, best.roles, since)
