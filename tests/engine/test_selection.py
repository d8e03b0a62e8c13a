import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.selection import draw, largest, nucleus, total, weigh

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
    ids = nucleus(row, row, mass).tolist()
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
    ids = nucleus(row, row, mass)
    assert ids.tolist() == order[: len(ids)].tolist()
    assert abs(len(ids) - (int((sums < mass * total(row)).sum()) + 1)) <= (50 if mass == 1.0 else 0)


def test_nucleus_of_everything_when_its_target_is_out_of_reach():
    row = np.full(100_000, 0.1, np.float32)
    assert len(nucleus(row, row, 1.0 + 1e-9)) == len(row)


def test_nucleus_follows_the_scores_where_weights_are_equal():
    scores = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    weights = np.full(4, 0.25, np.float32)
    assert nucleus(scores, weights, 0.5).tolist() == [1, 3]
    assert nucleus(scores, weights, 0.6).tolist() == [1, 3, 2]


@given(st.floats(-40, 0), st.sampled_from([0.3, 0.8, 1.0, 2.0]))
def test_weights_are_exponentials_on_a_grid(x, temperature):
    score = np.array([x], np.float32)
    weight = weigh(score, np.float32(0.0), np.float32(temperature))[0]
    assert float(weight) * 2**34 == int(float(weight) * 2**34)
    exact = math.exp(float(score[0]) / float(np.float32(temperature)))
    assert float(weight) == pytest.approx(exact, rel=5e-6, abs=2**-34.9)


def test_weights_at_the_ends():
    scores = np.array([5.0, -np.inf, -3.4e38, -20.0], np.float32)
    assert weigh(scores, np.float32(5.0), np.float32(1.0)).tolist()[:3] == [1.0, 0.0, 0.0]
    everything = weigh(scores, np.float32(5.0), np.float32(3.4e38))
    assert everything.tolist()[0] == everything.tolist()[3] == 1.0


@pytest.mark.parametrize("order", ["as it is", "reversed", "sorted"])
def test_sums_do_not_depend_on_the_order(order):
    row = weigh(
        np.random.default_rng(1).normal(0, 6, 49_152).astype(np.float32), np.float32(30), np.float32(1)
    )
    other = {"as it is": row, "reversed": row[::-1], "sorted": np.sort(row)}[order]
    assert total(row) == math.fsum(row.tolist()) == float(np.cumsum(other, dtype=np.float64)[-1])


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
