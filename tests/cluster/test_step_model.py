"""The model of a step's time: its inverse is exact to the token."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.step_model import StepModel, StepWork, chunk_attention

H100 = StepModel(
    fixed_s=0.9e-3, floor_s=5.0e-3, per_token_s=19.1e-6, per_context_s=46.8e-9, per_attention_s=1.05e-9
)

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


@given(st.integers(0, 40), st.integers(0, 2_000), st.floats(0.0, 0.2))
def test_a_chunk_beside_rows_pays_the_price_of_mixed_steps(rows: int, start: int, budget_s: float) -> None:
    priced = msgspec.structs.replace(H100, mixed_s=8e-3)
    beside = StepWork(rows, 900 * rows)
    count = priced.most_chunk_tokens(beside, start, 10_000, budget_s)
    if count:
        step = StepWork(rows + count, beside.context, chunk_attention(start, count))
        assert priced.step_s(step) <= budget_s * (1 + 1e-9)
        assert priced.step_s(step) == pytest.approx(H100.step_s(step) + (8e-3 if rows else 0.0))
    paid_s = budget_s - 8e-3 if rows else budget_s
    assert count == H100.most_chunk_tokens(beside, start, 10_000, paid_s)
