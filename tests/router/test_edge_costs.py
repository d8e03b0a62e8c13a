"""What hand-offs cost, learned per pair."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.step_model import StepModel
from router.edge_costs import EdgeCosts
from router.fleet import EXPOSED, Fleet

MODEL = StepModel(1e-3, 9e-3, 2e-4, 1e-7, 1e-8)


def made(num_workers: int = 3) -> tuple[Fleet, EdgeCosts]:
    fleet = Fleet([MODEL] * num_workers, [1e5] * num_workers, [1e9] * num_workers)
    return fleet, EdgeCosts(fleet, handoff_s=0.002, cold_s=0.02)


def test_latency_and_bandwidth_are_told_apart() -> None:
    fleet, edges = made()
    for i in range(60):
        num_bytes = 1e6 * (1 + i % 7)
        edges.note(0, 1, num_bytes, 0.004 + num_bytes / 5e8)
    expected = 0.004 + 3e6 / 5e8
    assert fleet.exposed_s(0, 3e6, 0.002)[1] == pytest.approx(expected, rel=1e-6)


def test_alike_hand_offs_fix_what_they_can() -> None:
    fleet, edges = made()
    for _ in range(20):
        edges.note(0, 1, 1e6, 0.010)
    assert fleet.exposed_s(0, 1e6, 0.002)[1] == pytest.approx(0.010)
    for _ in range(100):  # faster than any bandwidth says: nothing below 0
        edges.note(0, 2, 1e9, 0.001)
    assert fleet.exposed_s(0, 1e9, 0.002)[2] == pytest.approx(0.001)
    assert (fleet.edges[0].base_s >= 0).all()
    assert (fleet.edges[0].byte_s >= 0).all()


def test_it_forgets_what_was() -> None:
    fleet, edges = made()
    for seconds in [0.1] * 50 + [0.01] * 100:
        edges.note(0, 1, 1e6, seconds)
    assert fleet.exposed_s(0, 1e6, 0.002)[1] == pytest.approx(0.01, rel=0.05)


def test_pairs_that_never_met_are_cold() -> None:
    fleet, edges = made()
    edges.note(0, 1, 1e6, 0.003)
    exposed = fleet.exposed_s(0, 1e6, 0.002)
    assert exposed[1] == pytest.approx(0.003)
    assert exposed[2] == pytest.approx(0.022 + 1e6 * EXPOSED / 1e9)
    assert fleet.exposed_s(2, 1e6, 0.002) == pytest.approx(np.full(3, 0.002 + 1e6 * EXPOSED / 1e9))


def test_whoever_comes_next_is_cold_too() -> None:
    fleet, edges = made()
    edges.note(0, 1, 1e6, 0.003)
    edges.note(2, 1, 1e6, 0.003)
    edges.leave(1)
    edges.leave(2)
    edges.joined(1)
    assert list(fleet.edges) == [0]
    assert fleet.exposed_s(0, 1e6, 0.002)[1] == pytest.approx(0.022 + 1e6 * EXPOSED / 1e9)
    fleet.resize(6)
    fleet.bytes_s[4] = 1e9
    edges.joined(4)
    assert fleet.exposed_s(0, 1e6, 0.002)[4] == pytest.approx(0.022 + 1e6 * EXPOSED / 1e9)
    edges.note(0, 4, 1e6, 0.001)
    assert fleet.exposed_s(0, 1e6, 0.002)[4] == pytest.approx(0.001)
