"""The short way to an idle worker leads where placement leads."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.simulator.fleet import elastic
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.idle import idle_worker
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.workload import make_requests
from bench.simulator.hardware import KINDS
from bench.simulator.large.plan import made_rows
from cluster.slo_classes import Targets
from router.elastic import Ask, ElasticSettings, Place, place
from router.fleet import Fleet

H100, OPT = KINDS["h100-llama3-8b"], KINDS["a100-opt13b"]
SETTINGS = ElasticSettings()


def drawn_fleet(rng: random.Random, kind: Any) -> Fleet:
    count = rng.choice((1, 2, 5, 20))
    fleet = Fleet([kind.model] * count, [kind.kv_tokens] * count, [kind.link_bytes_s] * count)
    share_idle = rng.choice((0.0, 0.2, 0.9))
    for row in range(count):
        fleet.last_placed[row] = rng.randrange(2 * count)
        if rng.random() < share_idle:
            continue
        fleet.rows[row] = rng.choice((0, 0, 1, 30))
        fleet.context[row] = fleet.rows[row] * rng.randrange(3_000)
        fleet.queued_load_s[row] = rng.choice((0.0, 0.0, 1e-4))
        fleet.work_s[row] = rng.choice((0.0, 1e-4, 0.05))
        fleet.coming_rows[row] = rng.choice((0, 0, 2))
        fleet.kv_used[row] = rng.choice((fleet.context[row], 0.99 * kind.kv_tokens))
        fleet.kv_promised[row] = rng.choice((0.0, 0.0, 500.0))
    return fleet


@pytest.mark.parametrize("kind", [H100, OPT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(4))
def test_it_is_where_placement_goes(kind: Any, seed: int) -> None:
    rng = random.Random(seed)
    num_answers = 0
    for _ in range(400):
        fleet = drawn_fleet(rng, kind)
        num_tokens = rng.choice((1, 300, 1_000, 4_000, 9_000, 20_000, 60_000))
        ask = Ask(num_tokens, rng.choice((1.0, 200.0)), life_s=rng.choice((0.5, 5.0)))
        targets = Targets(
            rng.choice((0.1, 0.5, 2.0)), rng.choice((0.008, 0.025, 0.1)), rng.choice((1.0, 0.03))
        )
        found = idle_worker(fleet, ask, kind.model, targets, SETTINGS)
        if found is not None:
            num_answers += 1
            decision = place(fleet, ask, targets, SETTINGS)
            assert isinstance(decision, Place)
            assert (decision.prefill, decision.decode) == (found, found)
    assert num_answers > 5


@pytest.mark.parametrize("rate", [4.0, 40.0])
def test_a_run_is_the_same_without_it(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def times(shortcut: Any) -> list[tuple[float | None, float | None, int]]:
        monkeypatch.setattr(elastic, "idle_worker", shortcut)
        requests = make_requests(made_rows()[:500], rate, 200, 1)
        policy = ElasticPolicy(Targets(0.5, 0.025))
        Simulation([H100] * 4, requests, policy, 0.025).run(1e9)
        return [(one.first_s, one.finish_s, one.prefill_at) for one in requests]

    def noted(*arguments: Any) -> int | None:
        asked.append(idle_worker(*arguments))
        return asked[-1]

    assert times(noted) == times(lambda *_: None)
    assert sum(index is not None for index in asked) > (80 if rate < 10 else 2)
