import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.selection import draw, largest, nucleus, total

finite = st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 1.0, -np.inf, 2.5])


def in_order(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@st.composite
def rows(draw_, values=finite, max_size=300):
    return np.array(draw_(st.lists(values, min_size=1, max_size=max_size)), np.float32)


@given(rows(), st.integers(-1, 310))
def test_largest_is_the_head_of_the_sorted_row(row, count):
    assert largest(row, count).tolist() == in_order(row)[: max(count, 0)]


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 49_152])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "masked"])
def test_largest_on_every_route(vocab_size, kind):
    rng = np.random.default_rng(vocab_size)
    row = rng.standard_normal(vocab_size).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "constant":
        row[:] = 1.0
    elif kind == "masked":
        row[rng.random(vocab_size) < 0.999] = -np.inf
    expected = np.lexsort((np.arange(vocab_size), -row))
    for count in (1, 2, 20, 100, 600, 700, 767, 768, 5000, vocab_size - 1, vocab_size):
        assert largest(row, count).tolist() == expected[: max(count, 0)].tolist()


weights = st.floats(0, 1, width=32) | st.sampled_from([0.0, 1.0, 0.5, 0.25])


@given(rows(weights), st.floats(0, 1))
def test_nucleus_is_the_shortest_head_with_enough_mass(row, mass):
    row[0] = 1.0
    ids = nucleus(row, mass).tolist()
    assert ids == in_order(row)[: len(ids)]
    assert ids
    whole = float(row.astype(np.float64).sum())
    kept = float(row[ids].astype(np.float64).sum())
    assert kept >= mass * whole * (1 - 1e-6)
    if len(ids) > 1:
        assert kept - row[ids[-1]] < mass * whole * (1 + 1e-6)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("mass", [0.0, 0.3, 0.95, 0.9999, 1.0])
def test_nucleus_widens_until_it_is_enough(sharpness, mass):
    rng = np.random.default_rng(5)
    row = np.exp(rng.standard_normal(49_152).astype(np.float32) * sharpness - 10)
    order = np.lexsort((np.arange(len(row)), -row))
    sums = np.cumsum(row[order], dtype=np.float64)
    ids = nucleus(row, mass)
    assert ids.tolist() == order[: len(ids)].tolist()
    assert abs(len(ids) - (int((sums < mass * total(row)).sum()) + 1)) <= (50 if mass == 1.0 else 0)


def test_nucleus_of_everything_when_rounding_leaves_the_target_out_of_reach():
    row = np.full(100_000, 0.1, np.float32)
    assert len(nucleus(row, 1.0 + 1e-9)) == len(row)


@given(rows(weights), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_inverse_of_the_running_sum(row, u):
    row[len(row) // 2] = 1.0
    index = draw(row, u)
    assert row[index] > 0
    whole = float(row.astype(np.float64).sum())
    before = float(row[:index].astype(np.float64).sum())
    assert before <= u * whole + 1e-5 * whole
    assert before + row[index] >= u * whole - 1e-5 * whole


def test_draw_at_the_ends():
    row = np.zeros(200, np.float32)
    row[[70, 130]] = 1.0, 3.0
    assert draw(row, 0.0) == 70
    assert draw(row, 0.24) == 70
    assert draw(row, 0.25) == 130
    assert draw(row, np.nextafter(1.0, 0.0)) == 130


@settings(max_examples=20)
@given(st.integers(1, 2000))
def test_total(size):
    row = np.random.default_rng(size).random(size).astype(np.float32)
    assert total(row) == pytest.approx(float(row.astype(np.float64).sum()), rel=1e-5)
