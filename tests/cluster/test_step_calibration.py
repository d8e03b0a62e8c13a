"""Calibration: few steps, bounded in time, a model that fits them or a stated fallback."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import StepOutput, StepPlan
from cluster.live_step_model import ASSUMED
from cluster.step_calibration import BUDGET_S, Pool, fit_calibration, measure, shapes
from cluster.step_model import StepModel, StepWork, chunk_attention
from tests.support.decode_bench import work_of

POOL = Pool(num_blocks=64, block_size=32, max_tokens=2048)
LAPTOP = StepModel(2e-3, 9e-3, 6e-4, 3e-7, 2e-8)
PHONE = StepModel(0.05, 0.9, 0.02, 1e-5, 1e-6)
WATCH = StepModel(0.2, 3.6, 0.08, 4e-5, 4e-6)


class Machine:
    """Takes as long as its model says, and sometimes several times that."""

    def __init__(self, model: StepModel, disturbed: float = 0.0) -> None:
        self.now = 100.0
        self.plans: list[StepPlan] = []
        self._model = model
        self._disturbed = disturbed
        self._rng = random.Random(5)

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan, await_history: object = None) -> StepOutput:
        self.plans.append(plan)
        seconds = self._model.step_s(work_of(plan)) * (4.0 if self._rng.random() < self._disturbed else 1.0)
        self.now += seconds
        return StepOutput((None,) * len(plan.rows), seconds)


def test_a_handful_of_steps_tells_how_long_others_take() -> None:
    machine = Machine(LAPTOP)
    found = fit_calibration(measure(machine, POOL, clock=machine.clock))
    assert found.problem is None
    assert found.num_shapes == 8
    assert machine.now - 100.0 <= BUDGET_S
    for work in (
        StepWork(1, 300),
        StepWork(16, 16 * 700),
        StepWork(128, 0, chunk_attention(500, 128)),
        StepWork(300, 0, chunk_attention(0, 300)),
    ):
        assert found.model.step_s(work) == pytest.approx(LAPTOP.step_s(work), rel=0.05)


@pytest.mark.parametrize("budget_s", [0.4, 1.0, 3.0])
def test_it_ends_in_time_and_slow_steps_are_not_begun(budget_s: float) -> None:
    machine = Machine(LAPTOP)
    steps = measure(machine, POOL, budget_s, machine.clock)
    assert machine.now - 100.0 <= budget_s
    assert len(steps) >= 5


def test_steps_that_something_disturbed_do_not_count() -> None:
    machine = Machine(LAPTOP, disturbed=0.3)
    found = fit_calibration(measure(machine, POOL, 3.0, machine.clock))
    assert found.problem is None
    for work in (StepWork(1, 300), StepWork(32, 16_000), StepWork(256, 0, chunk_attention(0, 256))):
        assert found.model.step_s(work) == pytest.approx(LAPTOP.step_s(work), rel=0.15)


def test_a_slow_machine_gets_a_few_seconds_more() -> None:
    machine = Machine(PHONE)
    found = fit_calibration(measure(machine, POOL, clock=machine.clock))
    assert (found.problem, found.num_shapes) == (None, 4)
    assert machine.now - 100.0 <= 5 * BUDGET_S  # the last of them took longer than the ones before
    assert found.model.step_s(StepWork(1, 1)) == pytest.approx(PHONE.step_s(StepWork(1, 1)), rel=0.05)


def test_a_machine_too_slow_to_calibrate_is_assumed_as_slow_as_it_was() -> None:
    machine = Machine(WATCH)
    found = fit_calibration(measure(machine, POOL, clock=machine.clock))
    assert found.problem == "too few kinds of steps ran in the time there was (1)"
    assert machine.now - 100.0 <= 4 * BUDGET_S
    assert found.model.step_s(StepWork(1, 1)) == pytest.approx(WATCH.step_s(StepWork(1, 1)))
    assert found.model.ridge_tokens == pytest.approx(ASSUMED.ridge_tokens)


def test_what_follows_no_model_is_said() -> None:
    steps = [
        (StepWork(n, 0, 1.0), seconds) for n, seconds in ((1, 5.0), (64, 0.001), (65, 9.0), (512, 0.002))
    ]
    found = fit_calibration(steps)
    assert found.problem is not None
    assert "follow no model" in found.problem
    assert found.model.per_token_s > 0


def test_nothing_measured_is_the_assumed_machine() -> None:
    found = fit_calibration([])
    assert (found.model, found.problem) == (ASSUMED, "no step of the calibration ran")


@given(st.integers(1, 200), st.sampled_from([8, 16, 32, 128]), st.integers(1, 5000))
def test_every_step_fits_the_pool_and_the_model(num_blocks: int, block_size: int, max_tokens: int) -> None:
    pool = Pool(num_blocks, block_size, max_tokens)
    machine = Machine(LAPTOP)
    measure(machine, pool, 5.0, machine.clock)
    assert machine.plans
    assert len(set(shapes(pool))) == len(shapes(pool))
    for plan in machine.plans:
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            assert 0 < end <= max_tokens
            assert end <= len(row.block_ids) * block_size
            assert all(0 <= block < num_blocks for block in row.block_ids)
            assert len(set(row.block_ids)) == len(row.block_ids)


def test_equal_machines_are_asked_the_same() -> None:
    first, second = Machine(LAPTOP), Machine(LAPTOP)
    assert measure(first, POOL, clock=first.clock) == measure(second, POOL, clock=second.clock)
    assert first.plans == second.plans
