"""A fit finds what made the steps, whatever disturbed some of them, and invents nothing it was not shown."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.live_step_model import REFIT_EVERY, LiveStepModel
from cluster.step_fit import StepModelFit, median, quantile, weighted_quantile
from cluster.step_model import StepModel, StepWork, chunk_attention

H100 = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
LAPTOP = StepModel(2e-3, 12e-3, 1.5e-3, 0.3e-6, 40e-9)
BASE = StepModel(2e-3, 3e-3, 40e-6, 20e-9, 3e-9)
SHAPES = (StepWork(1, 500), StepWork(40, 60_000), StepWork(90, 20_000, 40 * 3000.0))


def chunk(num_tokens: int, start: int, rows: int = 0, context: int = 0) -> StepWork:
    attention = chunk_attention(start, num_tokens) if num_tokens else 0.0
    return StepWork(rows + num_tokens, context if rows else 0, attention)


def works(seed: int, num_steps: int, chunks: tuple[int, ...]) -> list[StepWork]:
    numbers = random.Random(seed)
    found = []
    for _ in range(num_steps):
        rows = numbers.randrange(1, 60)
        found.append(
            chunk(numbers.choice(chunks), numbers.randrange(4000), rows, rows * numbers.randrange(100, 3000))
        )
    return found


def fitted(
    model: StepModel, seed: int = 0, num_steps: int = 300, noise: float = 0.0, **how: object
) -> StepModel:
    numbers, fit = random.Random(seed), StepModelFit(BASE)
    chunks = how.get("chunks", (0, 0, 64, 256, 1024))
    assert isinstance(chunks, tuple)
    for work in works(seed, num_steps, chunks):
        slow = 4.0 if numbers.random() < float(str(how.get("disturbed", 0.0))) else 1.0
        fit.add(work, model.step_s(work) * slow * math.exp(numbers.gauss(0, noise)))
    return fit.fit()


@pytest.mark.parametrize("model", [H100, LAPTOP], ids=["h100", "laptop"])
def test_a_fit_finds_the_model_that_made_the_steps(model: StepModel) -> None:
    found = fitted(model)
    for work in (*SHAPES, chunk(1024, 0), chunk(512, 6000)):
        assert found.step_s(work) == pytest.approx(model.step_s(work), rel=0.02)
    assert found.per_token_s == pytest.approx(model.per_token_s, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_disturbed_steps_do_not_poison_it(seed: int) -> None:
    found = fitted(H100, seed, noise=0.05, disturbed=0.2)
    for work in (*SHAPES, chunk(700, 4000, 50, 50_000)):
        assert found.step_s(work) == pytest.approx(H100.step_s(work), rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_a_price_of_mixed_steps_is_found_where_there_is_one(seed: int) -> None:
    priced = msgspec.structs.replace(H100, mixed_s=4e-3)
    found = fitted(priced, seed, noise=0.03)
    assert 2e-3 < found.mixed_s < 5e-3
    for work in (*SHAPES, chunk(64, 0, 20, 20_000), chunk(700, 4000, 50, 50_000)):
        assert found.step_s(work) == pytest.approx(priced.step_s(work), rel=0.08)
    assert fitted(H100, seed, noise=0.03).mixed_s < 0.2e-3


def test_decode_alone_tells_nothing_of_chunks_so_the_base_does_at_this_speed() -> None:
    twice = BASE.slower(2.0)
    found = fitted(twice, chunks=(0,))
    for work in (*SHAPES[:2], chunk(1024, 0), chunk(64, 2000)):
        assert found.step_s(work) == pytest.approx(twice.step_s(work), rel=0.05)


def test_chunks_alone_leave_decode_to_the_base() -> None:
    found = fitted(BASE, chunks=(512, 1024))
    assert found.step_s(StepWork(8, 8_000)) == pytest.approx(BASE.step_s(StepWork(8, 8_000)), rel=0.1)


def test_nothing_seen_is_the_base() -> None:
    assert StepModelFit(BASE).fit() == BASE


steps = st.tuples(
    st.integers(1, 2000), st.integers(0, 100_000), st.floats(0, 1e7), st.floats(min_value=1e-5, max_value=10)
)


@given(st.lists(steps, min_size=1, max_size=60))
@example([(1, 0, 0.0, 1.0), (1, 0, 0.0, 1.0), (1, 19, 11.0, 1e-05)])  # all in attention, nothing else is left
def test_whatever_ran_the_coefficients_are_finite_and_never_negative(
    ran: list[tuple[int, int, float, float]],
) -> None:
    fit = StepModelFit(BASE)
    for tokens, context, attention, seconds in ran:
        fit.add(StepWork(tokens, context, attention), seconds)
    model = fit.fit()
    assert all(0 <= getattr(model, name) < math.inf for name in StepModel.__struct_fields__)
    assert model.step_s(StepWork(1, 1)) > 0


def test_a_model_that_lost_its_slope_finds_it_again() -> None:
    live = LiveStepModel()
    live.model = StepModel(1e-3, 5e-3, 0.0, 0.0, 0.0)
    for work in works(3, 200, (0, 64, 512)):
        live.observe(work, LAPTOP.step_s(work))
    assert live.model.step_s(chunk(512, 0)) == pytest.approx(LAPTOP.step_s(chunk(512, 0)), rel=0.1)


def test_steps_that_say_nothing_are_left_out() -> None:
    fit = StepModelFit(BASE)
    for work, seconds in ((StepWork(0), 1.0), (StepWork(5), 0.0), (StepWork(5), math.inf)):
        fit.add(work, seconds)
    assert len(fit) == 0


def test_a_stretch_of_decode_does_not_wash_out_what_chunks_taught() -> None:
    fit = StepModelFit(BASE, capacity=64)
    for work in works(1, 60, (64, 512)) + works(2, 500, (0,)):
        fit.add(work, LAPTOP.step_s(work))
    assert fit.fit().per_token_s == pytest.approx(LAPTOP.per_token_s, rel=0.05)


def test_the_quantile_of_the_error_is_what_a_safe_prediction_adds() -> None:
    numbers, fit = random.Random(6), StepModelFit(BASE)
    for work in works(6, 400, (0, 64, 1024)):
        fit.add(work, H100.step_s(work) * math.exp(numbers.gauss(0, 0.1)))
    assert fit.error_quantile(H100, 0.5) == pytest.approx(0.0, abs=0.03)
    assert fit.error_quantile(H100, 0.9) == pytest.approx(math.exp(0.1 * 1.2816) - 1, abs=0.05)


# ---- live ----------------------------------------------------------------------------------------


def test_live_errors_fall_as_the_model_learns_a_machine_it_did_not_expect() -> None:
    live = LiveStepModel()
    errors = []
    for number, work in enumerate(works(7, 6 * REFIT_EVERY, (0, 0, 32, 128)), 1):
        assert live.observe(work, LAPTOP.step_s(work)) or number % REFIT_EVERY
        if number % REFIT_EVERY == 0 or number == 8:
            errors.append(live.error)
    assert live.is_measured
    assert errors[0] > 0.2
    assert errors[-1] < 0.02
    assert live.error_p90 < 0.05


def test_live_refits_are_few_and_follow_a_machine_that_gets_slower() -> None:
    live = LiveStepModel(LAPTOP)
    live.reset(LAPTOP)
    changes = 0
    for work in works(8, 10 * REFIT_EVERY, (0, 64, 256)):
        changes += live.observe(work, 1.7 * LAPTOP.step_s(work))
    assert changes <= 18  # twelve refits, and its speed meanwhile
    for work in SHAPES:
        assert live.model.step_s(work) == pytest.approx(1.7 * LAPTOP.step_s(work), rel=0.1)


def test_equal_steps_give_equal_models() -> None:
    def run() -> StepModel:
        live = LiveStepModel()
        for work in works(9, 100, (0, 64)):
            live.observe(work, H100.step_s(work))
        return live.model

    assert run() == run()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    numbers = np.array(values)
    assert quantile(numbers, share) == pytest.approx(float(np.quantile(numbers, share)), rel=1e-12, abs=1e-9)
    assert median(numbers) == pytest.approx(float(np.median(numbers)), rel=1e-12, abs=1e-9)


def learned(noise: float = 0.0) -> LiveStepModel:
    """That knows LAPTOP."""
    numbers, live = random.Random(9), LiveStepModel(LAPTOP)
    for work in works(9, 4 * REFIT_EVERY, (0, 0, 32, 128)):
        live.observe(work, LAPTOP.step_s(work) * math.exp(numbers.gauss(0, noise)))
    return live


@pytest.mark.parametrize("times", [0.5, 1.3, 2.0])
def test_a_machine_that_changes_its_speed_is_followed_within_few_steps(times: float) -> None:
    """Long before the steps at the former speed are forgotten: for steps of kinds that have not run since."""
    live = learned(noise=0.02)
    for work in works(10, 16, (0,)):
        live.observe(work, times * LAPTOP.step_s(work))
    unseen = chunk(128, 500, 8, 4000)
    assert live.model.step_s(unseen) == pytest.approx(times * LAPTOP.step_s(unseen), rel=0.15)


@pytest.mark.parametrize("times", [0.05, 4.0, 20.0])
def test_a_machine_that_is_not_as_assumed_is_known_after_the_first_fit(times: float) -> None:
    """What was expected wrongly before is forgotten with it."""
    live = LiveStepModel(LAPTOP)
    machine = LAPTOP.slower(times)
    for work in works(12, 8, (0, 0, 32, 128)):
        live.observe(work, machine.step_s(work))
    for work in works(13, 10, (0, 32)):
        assert live.model.step_s(work) == pytest.approx(machine.step_s(work), rel=0.05)


def test_a_hiccup_is_not_the_speed_of_the_machine() -> None:
    live, work = learned(), StepWork(8, 4000)
    live.observe(work, 50 * LAPTOP.step_s(work))
    assert live.model.step_s(work) < 1.1 * LAPTOP.step_s(work)


def test_noise_does_not_change_the_model_between_refits() -> None:
    live = learned()
    model, numbers = live.model, random.Random(11)
    for work in works(11, REFIT_EVERY - 1, (0, 32)):
        changed = live.observe(work, LAPTOP.step_s(work) * math.exp(numbers.uniform(-0.04, 0.04)))
        assert not changed
        assert live.model is model


@given(st.lists(steps, min_size=1, max_size=80))
def test_whatever_ran_the_live_model_is_finite_and_says_when_it_changed(
    ran: list[tuple[int, int, float, float]],
) -> None:
    live = LiveStepModel()
    for tokens, context, attention, seconds in ran:
        before = live.model
        changed = live.observe(StepWork(tokens, context, attention), seconds)
        assert changed or live.model is before
        assert all(0 <= getattr(live.model, name) < math.inf for name in StepModel.__struct_fields__)
        assert live.model.step_s(StepWork(1, 1)) > 0


def test_live_errors_count_by_the_time_they_take() -> None:
    """A short step took twice as long, and is hardly seen; a hiccup counts by half a step."""
    live = LiveStepModel(LAPTOP)
    live.reset(LAPTOP)
    short, long = StepWork(1, 100), StepWork(300, 1000, 1e6)
    short_s, long_s = LAPTOP.step_s(short), LAPTOP.step_s(long)
    for number in range(7):
        live.observe(long, long_s * (0.95 if number else 9.0))
    live.observe(short, 2 * short_s)  # the eighth: a fit
    total_s = 7 * long_s + short_s
    bias = (0.5 * long_s - 6 * 0.05 * long_s + 0.5 * short_s) / total_s
    assert live.bias == pytest.approx(bias)
    assert live.spread == pytest.approx(0.5 - bias)


def test_live_steps_that_take_what_is_predicted_have_neither_bias_nor_spread() -> None:
    live = LiveStepModel(LAPTOP)
    live.reset(LAPTOP)
    for work in works(10, 2 * REFIT_EVERY, (0, 64)):
        live.observe(work, LAPTOP.step_s(work))
    assert (live.bias, live.spread) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_weighted_quantile_is_of_the_weight() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0])
    assert [weighted_quantile(values, weights, share) for share in (0.5, 0.85, 0.95)] == [1.0, 2.0, 3.0]
