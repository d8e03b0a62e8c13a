"""A few workers looked at one by one are chosen among as all of them at once would be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router import choosing
from router.choosing import NONE, Few, Many
from router.elastic import ElasticSettings, Place, choose_decode, place, predicted_ttft_s
from router.fleet import Fleet
from tests.router.test_same_decisions import MODELS, draw_ask, draw_fleet, draw_targets

SETTINGS = ElasticSettings()


@pytest.fixture
def pool() -> Fleet:
    fleet = Fleet([MODELS[0]] * 4, [1e6] * 4, [1e9] * 4)
    fleet.last_placed[:] = [3, 9, 1, 2]
    return fleet


@pytest.mark.parametrize("seed", range(10))
def test_decisions_are_the_same_to_the_last_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        num_workers = rng.choice((1, 2, 3, 5, 9))
        fleet, ask, targets = draw_fleet(rng, num_workers), draw_ask(rng, num_workers), draw_targets(rng)
        may_decode = fleet.can_decode if ask.may_decode is None else ask.may_decode
        if not may_decode.any():
            continue
        prefill, wait_s = rng.randrange(num_workers), rng.choice((0.0, 0.3))
        found = []
        for few in (0, 100):
            monkeypatch.setattr(choosing, "FEW", few)
            found.append(
                (
                    place(fleet, ask, targets, SETTINGS),
                    choose_decode(fleet, ask, prefill, targets, SETTINGS, wait_s),
                    predicted_ttft_s(fleet, ask, targets, SETTINGS).tolist(),
                )
            )
        assert found[0] == found[1]


def test_a_worker_says_what_its_columns_say(pool: Fleet) -> None:
    pool.rows[2], pool.can_send[1] = 7, False
    assert pool.workers() == [pool.worker(row) for row in range(4)]
    assert (pool.worker(2).rows, pool.worker(2).last_placed) == (7.0, 1.0)
    assert [one.can_send for one in pool.workers()] == [True, False, True, True]


def test_rows_come_one_by_one_and_keep_what_they_said(pool: Fleet) -> None:
    """Decisions look at as many rows as there are, however much room the tables have."""
    for num_rows in range(5, 12):
        pool.resize(num_rows)
        pool.rows[num_rows - 1] = num_rows
        assert len(pool.rows) == len(pool.can_decode) == pool.num_workers == len(pool.workers()) == num_rows
    assert pool.last_placed.tolist() == [3, 9, 1, 2, *[0] * 7]
    assert pool.rows.tolist() == [0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11]
    assert pool.equals(pool.copy())


@pytest.mark.parametrize("kind", [Few, Many])
def test_choices(pool: Fleet, kind: type[Few | Many]) -> None:
    some = kind(pool)
    cost = some.column(np.array([1.0, 1.04, 1.05, 2.0]))
    near = some.near(cost, 0.05, some.column(np.array([False, True, True, True])))
    assert list(near) == [1, 2]  # the least of all is not among them
    near = some.near(cost, 0.05, some.column(np.array([True, True, True, False])))
    assert list(near) == [0, 1, 2]
    assert some.oldest_of(near, cost, 0.02, NONE) == 0
    assert some.oldest_of(near, cost, 0.10, NONE) == 2  # placed on longest ago
    assert some.oldest_of(near, cost, 0.10, 1) == 1
    assert some.lowest(cost) == 1.0
    assert some.only(some.column(np.array([False, False, True, False]))) == 2
    assert some.only(some.column(np.array([True, False, True, False]))) == NONE
    assert some.only(some.column(np.zeros(4, dtype=np.bool_))) == NONE


@pytest.mark.parametrize("few", [0, 100])
def test_a_worker_that_says_it_has_no_time_for_prompts_harms_nobody(
    pool: Fleet, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of 0 is believable: such a worker is slow, and no decision ends in an error."""
    monkeypatch.setattr(choosing, "FEW", few)
    pool.on_time_share[2] = 0.0
    rng = random.Random(3)
    ask, targets = draw_ask(rng, 4), draw_targets(rng)
    predicted_s = predicted_ttft_s(pool, ask, targets, SETTINGS)
    assert np.isfinite(predicted_s).all()
    assert predicted_s.argmax() == 2
    assert isinstance(place(pool, ask, targets, SETTINGS), Place)
