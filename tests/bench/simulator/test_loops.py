"""The live router and worker under load on a small machine: waits are what was predicted, nobody is refused
who would be served, and whoever is refused is told the truth."""

from __future__ import annotations

from statistics import median

import pytest

from bench.simulator.loops import Call, Load
from router.config import ConductorConfig

CAPACITY = 0.95  # requests per second that `Shape()` allows for


def served(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.finish_s is not None]


@pytest.mark.parametrize("num_clients", [1, 8, 32, 64])
def test_in_a_closed_loop_waits_are_as_predicted_and_nobody_is_refused(num_clients: int) -> None:
    calls = Load().closed(num_clients, max(10, 3 * num_clients))
    assert len(served(calls)) == len(calls)
    ratios = [call.predicted_s / call.ttft_s for call in calls if call.predicted_s is not None]
    assert len(ratios) == len(calls)
    assert 1 / 1.5 < median(ratios) < 1.5
    predicted_s, waited_s = sum(call.predicted_s or 0.0 for call in calls), sum(call.ttft_s for call in calls)
    assert 1 / 1.5 < predicted_s / waited_s < 1.5


@pytest.mark.parametrize("seed", [0, 1])
def test_who_is_overdue_does_not_wait_for_ever(seed: int) -> None:
    """Most are on time; those that are not have a share of their own (without it: up to 100 s)."""
    waits = sorted(call.ttft_s for call in Load(seed=seed).closed(32, 160))
    assert median(waits) <= 2.0
    assert waits[round(0.99 * (len(waits) - 1))] <= ConductorConfig().max_backlog_s


def test_beyond_its_capacity_it_refuses_early_and_tells_when_to_come_again() -> None:
    limit_s = ConductorConfig().max_backlog_s
    load = Load()
    calls = load.open(3 * CAPACITY, 180.0)
    refused = [call for call in calls if call.error is not None]
    assert len(refused) > 0.3 * len(calls)
    retry_after_s = refused[-1].retry_after_s
    assert retry_after_s is not None
    load.run(retry_after_s)
    again = load.one()
    assert again.error is None
    load.run(200.0)
    assert all(call.finish_s is not None for call in calls if call.error is None)
    # Prompts on time keep coming, and take from those that wait: no prediction knows of them.
    assert max(call.ttft_s for call in served(calls)) < 3 * limit_s
    assert again.ttft_s < 1.5 * limit_s


def test_equal_seeds_give_equal_runs() -> None:
    runs = [Load(seed=3).closed(4, 8) for _ in range(2)]
    assert runs[0] == runs[1]
