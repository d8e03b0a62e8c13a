"""`baton plan`: the roles that `router.planner` would give a pool for a trace, and what they would serve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.simulator.hardware import Hardware, names_of
from cluster.slo_classes import Targets
from router.planner import NO_RATE, Kind, best_roles

LEVEL = 0.02  # less is well within what predictions err


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in requests per second; roles by kind: prefill, decode, both. A split that serves no more than
    `LEVEL` above all doing both is not advised; `level_split_gain` is what it would serve more."""

    roles: dict[str, dict[str, int]]
    predicted_rate: float
    predicted_rate_per_accelerator: float
    rate_if_both: float
    level_split_gain: float


def kinds_of(pool: Sequence[Hardware]) -> list[Kind]:
    """Equal hardware is one kind; kinds that differ have names that differ."""
    counts = Counter(pool)
    return [Kind(name, counts[one], one.model, one.model.mixed_s) for one, name in names_of(pool).items()]


def plan_roles(pool: Sequence[Hardware], requests: Sequence[tuple[int, int]], targets: Targets) -> Plan:
    kinds = kinds_of(pool)
    sample = requests[:: max(1, len(requests) // 2000)]
    best, both = best_roles(kinds, sample, targets)
    gain = best.rate / both.rate - 1 if both.rate > NO_RATE else math.inf
    is_level = best.rate <= NO_RATE or gain < LEVEL
    if is_level:
        best = both
    roles = {
        kind.name: {"prefill": role.num_prefill, "decode": role.num_decode, "both": role.num_both}
        for kind, role in zip(kinds, best.roles, strict=True)
    }
    return Plan(
        roles=roles,
        predicted_rate=best.rate,
        predicted_rate_per_accelerator=best.rate / len(pool),
        rate_if_both=both.rate,
        level_split_gain=gain if is_level and math.isfinite(gain) else 0.0,
    )
