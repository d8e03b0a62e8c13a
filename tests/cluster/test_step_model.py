"""The model of a step's time: its inverse is exact to the token, and a fit finds what made the steps."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.step_fit import StepModelFit
from cluster.step_model import StepModel, StepWork, chunk_attention

H100 = StepModel(
    fixed_s=0.9e-3, floor_s=5.0e-3, per_token_s=19.1e-6, per_context_s=46.8e-9, per_attention_s=1.05e-9
)
PRIOR = StepModel(fixed_s=2e-3, floor_s=3e-3, per_token_s=40e-6, per_context_s=20e-9, per_attention_s=3e-9)

coefficients = st.floats(min_value=1e-9, max_value=1e-2)


def with_chunk(beside: StepWork, start: int, num_tokens: int) -> StepWork:
    attention = beside.attention + chunk_attention(start, num_tokens)
    return StepWork(beside.num_tokens + num_tokens, beside.context, attention)


def test_below_the_ridge_tokens_are_free() -> None:
    assert H100.step_s(StepWork(1)) == H100.step_s(StepWork(int(H100.ridge_tokens)))
    assert H100.step_s(StepWork(int(H100.ridge_tokens) + 10)) > H100.step_s(StepWork(1))


@given(
    model=st.builds(StepModel, coefficients, coefficients, coefficients, coefficients, coefficients),
    rows=st.integers(0, 500),
    context=st.integers(0, 10**6),
    attention=st.integers(0, 10**6),
    start=st.integers(0, 10**5),
    limit=st.integers(0, 10**5),
    budget_s=st.floats(min_value=0, max_value=10),
)
def test_the_longest_chunk_fits_and_one_token_more_does_not(
    model: StepModel, rows: int, context: int, attention: int, start: int, limit: int, budget_s: float
) -> None:
    beside = StepWork(rows, context, float(attention))
    most = model.most_chunk_tokens(beside, start, limit, budget_s)
    assert 0 <= most <= limit
    rounding = 1e-9 * max(1.0, model.step_s(with_chunk(beside, start, most)))
    if most > 0:
        assert model.step_s(with_chunk(beside, start, most)) <= budget_s + rounding
    if most < limit:
        assert model.step_s(with_chunk(beside, start, most + 1)) > budget_s - rounding


def observed(
    model: StepModel, seed: int, num_steps: int, noise: float, chunks: tuple[int, ...]
) -> StepModelFit:
    numbers, fit = random.Random(seed), StepModelFit(PRIOR)
    for _ in range(num_steps):
        rows, start, chunk = numbers.randrange(1, 200), numbers.randrange(8000), numbers.choice(chunks)
        work = with_chunk(StepWork(rows, rows * numbers.randrange(100, 3000)), start, chunk)
        fit.add(work, model.step_s(work) * math.exp(numbers.gauss(0, noise)))
    return fit


def test_a_fit_finds_the_model_that_made_the_steps() -> None:
    model = observed(H100, 1, 500, 0.0, (0, 0, 64, 256, 1024)).fit()
    for name in StepModel.__struct_fields__:
        assert getattr(model, name) == pytest.approx(getattr(H100, name), rel=1e-6), name


def test_a_fit_predicts_well_under_noise() -> None:
    model = observed(H100, 2, 500, 0.05, (0, 0, 64, 256, 1024)).fit()
    for work in (StepWork(1, 500), StepWork(150, 200_000), with_chunk(StepWork(50, 50_000), 4000, 700)):
        assert model.step_s(work) == pytest.approx(H100.step_s(work), rel=0.05)


def test_decode_alone_tells_nothing_of_the_ridge_so_the_prior_does() -> None:
    model = observed(H100, 3, 200, 0.0, (0,)).fit()
    assert model.ridge_tokens == pytest.approx(PRIOR.ridge_tokens)
    assert model.step_s(StepWork(50, 10_000)) == pytest.approx(H100.step_s(StepWork(50, 10_000)), rel=1e-6)


def test_long_chunks_alone_keep_the_ridge_of_the_prior() -> None:
    model = observed(H100, 4, 200, 0.0, (1024, 2048)).fit()
    work = with_chunk(StepWork(10, 10_000), 1000, 1500)
    assert model.step_s(work) == pytest.approx(H100.step_s(work), rel=1e-6)
    assert model.ridge_tokens == pytest.approx(PRIOR.ridge_tokens)


def test_few_steps_change_nothing() -> None:
    assert observed(H100, 5, 5, 0.0, (0, 64)).fit() == PRIOR


def test_coefficients_are_never_negative() -> None:
    fit = StepModelFit(PRIOR)
    for tokens, seconds in ((1, 9.0), (2, 8.0), (3, 7.0), (500, 6.0), (600, 5.0), (700, 4.0), (800, 3.0)):
        fit.add(StepWork(tokens, tokens * 10, tokens * 5.0), seconds)
    model = fit.fit()
    assert all(getattr(model, name) >= 0 for name in StepModel.__struct_fields__)


def test_steps_that_say_nothing_are_left_out() -> None:
    fit = StepModelFit(PRIOR)
    for work, seconds in ((StepWork(0), 1.0), (StepWork(5), 0.0), (StepWork(5), math.inf)):
        fit.add(work, seconds)
    assert len(fit) == 0


def test_the_quantile_of_the_error_is_what_a_safe_prediction_adds() -> None:
    fit = observed(H100, 6, 500, 0.1, (0, 64, 1024))
    model = fit.fit()
    assert fit.residual_quantile(model, 0.5) == pytest.approx(0.0, abs=0.02)
    assert fit.residual_quantile(model, 0.9) == pytest.approx(math.exp(0.1 * 1.2816) - 1, abs=0.04)
