"""Placement decides as it did when `decisions.json` was recorded, over thousands of drawn clusters: making it
faster must change nothing.

A change of the policy that is meant is recorded anew with `python -m tests.router.test_same_decisions`.
"""

from __future__ import annotations

import json
import math
import random
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.placement import TARGETS, Site
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from router.config import PolicyConfig
from router.elastic import Ask, ElasticSettings, Place, place
from router.fleet import EdgeRow, Fleet
from router.policy import Elastic, Placement

RECORD = Path(__file__).with_name("decisions.json")
GROUPS = range(24)
CASES_PER_GROUP = 60
LARGE = (24, 25)  # groups of a thousand workers, where all are looked at in vector operations
LARGE_FLEETS, LARGE_CASES = 15, 1_000
MODELS = (
    StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9),
    StepModel(0.9e-3, 4.2e-3, 128e-6, 39.2e-9, 7e-9),
    StepModel(2e-3, 1e-3, 400e-6, 0.0, 2e-9),
)


def draw_fleet(rng: random.Random, num_workers: int, most_edges: int | None = None) -> Fleet:
    kinds = rng.choice((MODELS[:1], MODELS[:2], MODELS))
    fleet = Fleet(
        [rng.choice(kinds) for _ in range(num_workers)],
        [rng.choice((5_000.0, 40_000.0, 640_000.0)) for _ in range(num_workers)],
        [rng.choice((1e9, 25e9)) for _ in range(num_workers)],
    )
    fullness = rng.choice((0.0, 0.3, 0.9, 1.3))
    busy = rng.choice((0.0, 0.2, 1.0, 4.0))
    for row in range(num_workers):
        if rng.random() < 0.8:
            fleet.work_s[row] = busy * rng.random() * rng.choice((0.1, 1.0))
            fleet.late_s[row] = busy * rng.random() * rng.choice((0.0, 3.0))
            fleet.queued_load_s[row] = busy * rng.random() * 3e-3
            fleet.rows[row] = rng.randrange(1 + int(64 * busy))
            fleet.context[row] = fleet.rows[row] * rng.randrange(4_000)
            fleet.coming_rows[row] = rng.randrange(4)
            fleet.coming_context[row] = fleet.coming_rows[row] * rng.randrange(4_000)
        fleet.kv_used[row] = fullness * rng.random() * fleet.kv_tokens[row]
        fleet.kv_promised[row] = rng.choice((0.0, 0.0, 2_000.0))
        fleet.last_placed[row] = rng.randrange(num_workers)
    split = rng.choice(("both", "roles", "drawn"))
    for row in range(num_workers):
        if split == "roles":
            fleet.can_send[row] = row % 3 == 0
            fleet.can_decode[row] = row % 3 != 0
        elif split == "drawn":
            fleet.can_send[row], fleet.can_decode[row] = rng.random() < 0.5, rng.random() < 0.7
            fleet.can_prefill[row] = rng.random() < 0.9
    for row in rng.sample(range(num_workers), rng.randrange(most_edges or num_workers)):
        base_s = np.array([rng.choice((0.0, 1e-3, 0.05)) for _ in range(num_workers)])
        byte_s = np.array([rng.choice((1e-12, 1e-10)) for _ in range(num_workers)])
        fleet.edges[row] = EdgeRow(base_s, byte_s)
    return fleet


def draw_ask(rng: random.Random, num_workers: int) -> Ask:
    num_tokens = rng.choice((10, 300, 4_000, 30_000))
    cached = None
    if rng.random() < 0.6:
        levels = [0.0, 0.0, *(float(rng.randrange(num_tokens)) for _ in range(3))]
        cached = np.array([rng.choice(levels) for _ in range(num_workers)])
    ask = Ask(
        num_tokens=num_tokens,
        expected_output=rng.choice((1.0, 50.0, 2_000.0)),
        cached=cached,
        life_s=rng.choice((0.5, 10.0, math.inf)),
        max_wait_s=rng.choice((math.inf, 0.05, 5.0)),
    )
    if rng.random() < 0.5:
        return ask
    flags = [np.array([rng.random() < share for _ in range(num_workers)]) for share in (0.9, 0.7)]
    return msgspec.structs.replace(ask, may_prefill=flags[0], may_decode=flags[1])


def draw_targets(rng: random.Random) -> Targets:
    return Targets(rng.choice((0.05, 0.5, 5.0)), rng.choice((8e-3, 25e-3, 0.1)), rng.choice((math.inf, 0.03)))


def decide_in_fleet(rng: random.Random) -> str:
    num_workers = rng.choice((1, 2, 7, 40))
    return decide(draw_fleet(rng, num_workers), draw_ask(rng, num_workers), draw_targets(rng))


def decide(fleet: Fleet, ask: Ask, targets: Targets) -> str:
    may_decode = fleet.can_decode if ask.may_decode is None else ask.may_decode
    if not may_decode.any():
        return "nobody decodes"
    decision = place(fleet, ask, targets, ElasticSettings())
    if isinstance(decision, Place):
        return f"{decision.prefill} {decision.decode} {decision.ttft_s:.9g}"
    return f"away {decision.retry_after_s and round(decision.retry_after_s, 9)}"


def decide_in_large_fleets(rng: random.Random) -> list[str]:
    decisions = []
    for _ in range(LARGE_FLEETS):
        fleet = draw_fleet(rng, 1_000, most_edges=3)
        decisions += [decide(fleet, draw_ask(rng, 1_000), draw_targets(rng)) for _ in range(4)]
    return decisions


def decide_in_book(rng: random.Random) -> list[str]:
    """Through the router's own view, with claims and reports in between."""
    site = Site(rng.choice((4, 12, 40)), rng.choice((300, 3_000)), rng.randrange(10**6))
    return decide_at(site, rng, CASES_PER_GROUP)


def decide_at(site: Site, rng: random.Random, num_cases: int) -> list[str]:
    policy = Elastic(PolicyConfig(always_remote=rng.random() < 0.2), TARGETS)
    decisions = []
    for index in range(num_cases):
        request = site.request()
        avoid = frozenset(rng.sample(site.workers, rng.choice((0, 0, 1, 3))))
        request = msgspec.structs.replace(request, targets=draw_targets(rng), avoid=avoid)
        decision = policy.place(site.book.view(), request, 0.0)
        decisions.append(repr(decision))
        if isinstance(decision, Placement):
            site.claim(f"r{index}", request, decision)
        site.heartbeat(rng.choice(site.workers))
        site.report(rng.choice(site.workers))
    return decisions


def digest(group: int) -> str:
    rng = random.Random(group)
    if group in LARGE:
        lines = decide_in_large_fleets(rng) + decide_at(Site(1_000, 20_000, group), rng, LARGE_CASES)
    else:
        lines = [decide_in_fleet(rng) for _ in range(CASES_PER_GROUP)] + decide_in_book(rng)
    return blake2b("\n".join(lines).encode(), digest_size=12).hexdigest()


@pytest.mark.parametrize("group", [*GROUPS, *LARGE])
def test_decisions_are_the_recorded_ones(group: int) -> None:
    assert digest(group) == json.loads(RECORD.read_text())[group]


def test_drawn_cases_are_of_every_kind() -> None:
    rng = random.Random(0)
    decisions = [decide_in_fleet(rng).split() for _ in range(1_000)]
    placed = [one for one in decisions if one[0].isdigit()]
    assert sum(one[0] == one[1] for one in placed) > 100
    assert sum(one[0] != one[1] for one in placed) > 100
    assert sum(one[0] == "away" for one in decisions) > 20


if __name__ == "__main__":
    RECORD.write_text(json.dumps([digest(group) for group in (*GROUPS, *LARGE)], indent=1) + "\n")
