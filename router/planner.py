"""Roles of workers: which only prefill, only decode, or do both. By predicted goodput, with hysteresis.

1. A `Workload` sums up recent requests: their prefill and decode work, the costliest tenth left out, since a
   tenth may miss its targets.
2. `best_roles` tries the splits of each kind and predicts the rate each would sustain.
3. `Planner.decide` changes what is only if the gain has been above `gain` for `patience` decisions in a row.

Algorithm: a worker has `step - fixed` seconds of each step for tokens. One that decodes may not spend more on
reading KV than its target leaves beside the weights; one that does both pays `mixed_s` per step. A rate is
feasible if decode fits into the workers that may decode, taken in order of comparative advantage (decode
seconds over prefill seconds, least first), and prefill into what is left of those that may prefill. The rate
is found by bisection.

Order: among equal predictions the split with the most workers that do both.

When nothing fits (no kind can meet the target): all do both, predicted rate 0; `decide` changes nothing.

Bounds: O(splits x kinds x 40); pure, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True, slots=True)
class RolePlan:
    roles: tuple[Roles, ...]  # by kind
    rate: float  # requests per second, the tenth that may miss included


SHARE_SERVED = 0.9
NO_RATE = 1e-6  # requests per second: none, for who searches by bisection


def work_of(requests: Sequence[tuple[int, int]], kinds: Sequence[Kind]) -> tuple[KindWork, ...]:
    """Per kind; the costliest tenth (on the first kind) left out, and all counted."""
    first = kinds[0].model
    ordered = sorted(requests, key=lambda one: sum(_costs(first, *one)[:2]))
    served = ordered[: max(1, int(SHARE_SERVED * len(ordered)))]
    works = []
    for kind in kinds:
        sums = [
            sum(parts) / len(ordered)
            for parts in zip(*(_costs(kind.model, *one) for one in served), strict=True)
        ]
        works.append(KindWork(*sums))
    return tuple(works)


def _costs(model: StepModel, num_prompt: int, num_output: int) -> tuple[float, float, float]:
    reading_s = num_output * model.per_context_s * (num_prompt + num_output / 2)
    prefill_s = model.per_token_s * num_prompt + model.per_attention_s * chunk_attention(0, num_prompt)
    return prefill_s, num_output * model.per_token_s + reading_s, reading_s


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
    step_s = min(targets.tpot_s, targets.gap_s)
    places: list[tuple[float, int, bool]] = []  # (decode seconds per prefill second, kind, both)
    for at, (kind, role) in enumerate(zip(kinds, roles, strict=True)):
        if kind.model.fixed_s + kind.model.floor_s >= step_s:
            continue
        ratio = works[at].decode_s / works[at].prefill_s
        places += [(ratio - 1e9, at, False)] if role.num_decode else []  # nothing else to do there
        places += [(ratio, at, True)] if role.num_both else []
    undone = rate  # requests per second still to be decoded
    prefill = sum(
        role.num_prefill * max(0.0, 1 - kind.model.fixed_s / max(targets.ttft_s / 4, step_s)) / work.prefill_s
        for kind, role, work in zip(kinds, roles, works, strict=True)
    )
    for _, at, is_both in sorted(places):
        kind, role, work = kinds[at], roles[at], works[at]
        count = role.num_both if is_both else role.num_decode
        left_s = step_s - kind.model.fixed_s - (kind.mixed_s if is_both else 0.0)
        limit = (
            count * (step_s - kind.model.fixed_s - kind.model.floor_s) / step_s / max(work.reading_s, 1e-12)
        )
        limit = min(limit, count * max(0.0, left_s) / step_s / work.decode_s)
        done = min(undone, limit)
        undone -= done
        if is_both:
            prefill += max(0.0, count * left_s / step_s - done * work.decode_s) / work.prefill_s
    return undone <= 1e-9 * rate and prefill >= rate


def best_roles(
    kinds: Sequence[Kind],
    requests: Sequence[tuple[int, int]],
    targets: Targets,
    *,
    may_only_decode: bool = True,
) -> tuple[RolePlan, RolePlan]:
    """(the best, all doing both)."""
    works = work_of(requests, kinds)
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
        now = predicted_rate(kinds, state.roles, work_of(requests, kinds), targets)
        if best.roles == state.roles or best.rate < max(NO_RATE, now * (1 + self.gain)):
            return PlannerState(state.roles)
        since = state.since + 1 if state.candidate == best.roles else 1
        if since >= self.patience:
            return PlannerState(best.roles)
        return PlannerState(state.roles, best.roles, since)
