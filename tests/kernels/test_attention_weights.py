"""Scores to weights: what is hidden does not count, nothing is subnormal, a row is the same among others."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.ops import PARTITION_SIZE
from tests.support.compiled_source import compiled

MOST_ROWS = 16
LEAST_NORMAL = 2.0**-126

Floats = NDArray[np.float32]


@pytest.fixture(scope="module", params=["native", "x86-64"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("attention_weights.cpp")
    return compiled(source, tmp_path_factory.mktemp("weights"), request.param)


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def powers(library: ctypes.CDLL, t: list[float]) -> list[float]:
    given, result = np.array(t, dtype=np.float32), np.empty(len(t), dtype=np.float32)
    library.weights_power_of_two(pointer(given), pointer(result), ctypes.c_int64(len(t)))
    return [float(value) for value in result]


def test_powers_are_near_down_to_the_least_normal_number(library):
    exponents = [0.0, -0.0, -0.25, -1.0, -1.75, -24.5, -125.99, -126.0]
    for t, power in zip(exponents, powers(library, exponents), strict=True):
        assert power == pytest.approx(2.0**t, rel=5e-6)
        assert power >= LEAST_NORMAL
    assert powers(library, [0.0, -3.0, -126.0]) == [1.0, 0.125, LEAST_NORMAL]


def test_what_would_be_less_is_nothing(library):
    assert powers(library, [-126.0001, -127.0, -148.0, -150.0, -300.0, -1e30, -math.inf]) == [0.0] * 7


def test_what_is_no_number_stays_none(library):
    assert all(math.isnan(power) for power in powers(library, [math.nan] * 17))


class Rows:
    """What rows have of all partitions so far."""

    def __init__(self) -> None:
        self.max = np.full(MOST_ROWS, -np.inf, dtype=np.float32)
        self.sum, self.rescale = np.zeros((2, MOST_ROWS), dtype=np.float32)

    def weigh(
        self, library: ctypes.CDLL, scores: Floats, visible: list[int], num_keys: int
    ) -> NDArray[np.uint16]:
        """bf16 weights of the first `num_keys` keys, as bits."""
        scores = scores.copy()
        weights = np.full(scores.shape, 0xFFFF, dtype=np.uint16)
        library.weights_weigh_rows(
            pointer(scores),
            pointer(weights),
            ctypes.c_int64(len(scores)),
            pointer(np.array(visible, dtype=np.int64)),
            ctypes.c_int64(num_keys),
            ctypes.c_float(0.25),
            pointer(self.max),
            pointer(self.sum),
            pointer(self.rescale),
        )
        return weights[:, :num_keys]


def widened(weights: NDArray[np.uint16]) -> Floats:
    return (weights.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("first", [0, 1, 30, 33, 100, 112])
def test_weights_are_of_what_a_row_sees(library, first):
    """Rows see one key more each; scores of the others, perhaps of memory nobody wrote, are no numbers."""
    draw = np.random.default_rng(first)
    scores = draw.normal(scale=40, size=(MOST_ROWS, PARTITION_SIZE)).astype(np.float32)
    visible = [max(1, first + row) for row in range(MOST_ROWS)]
    for row, seen in enumerate(visible):
        scores[row, seen:] = np.nan
    rows = Rows()
    weights = widened(rows.weigh(library, scores, visible, PARTITION_SIZE))
    for row, seen in enumerate(visible):
        exact = np.exp2((scores[row, :seen] - scores[row, :seen].max()).astype(np.float64) * 0.25)
        assert not weights[row, seen:].any()
        np.testing.assert_allclose(weights[row, :seen], exact, rtol=2**-8, atol=LEAST_NORMAL)
        assert rows.sum[row] == pytest.approx(exact.sum(), rel=1e-5)


def test_a_row_has_the_same_weights_alone_and_among_others_of_later_keys(library):
    draw = np.random.default_rng(1)
    before = draw.normal(scale=30, size=(MOST_ROWS, PARTITION_SIZE)).astype(np.float32)
    scores = draw.normal(scale=30, size=(MOST_ROWS, PARTITION_SIZE)).astype(np.float32)
    visible = [0, 0, 1, 5, 16, 17, 31, 32, 33, 47, 64, 65, 100, 101, 127, 128]
    whole = [PARTITION_SIZE] * MOST_ROWS
    together = Rows()
    together.weigh(library, before, whole, PARTITION_SIZE)
    weights = together.weigh(library, scores, visible, PARTITION_SIZE)
    for row, seen in enumerate(visible):
        alone, num_keys = Rows(), -(-max(1, seen) // 32) * 32
        alone.weigh(library, before[row : row + 1], whole[:1], PARTITION_SIZE)
        own = alone.weigh(library, scores[row : row + 1], [seen], num_keys)
        assert (weights[row, :num_keys] == own).all()
        assert not weights[row, num_keys:].any()
        for ours, others in (
            (alone.max, together.max),
            (alone.sum, together.sum),
            (alone.rescale, together.rescale),
        ):
            assert ours[0].tobytes() == others[row].tobytes()


def test_a_row_that_sees_nothing_more_keeps_what_it_has(library):
    draw = np.random.default_rng(2)
    scores = draw.normal(size=(1, PARTITION_SIZE)).astype(np.float32)
    rows = Rows()
    rows.weigh(library, scores, [PARTITION_SIZE], PARTITION_SIZE)
    kept = float(rows.max[0]), float(rows.sum[0])
    assert not rows.weigh(library, scores, [0], 32).any()
    assert (float(rows.max[0]), float(rows.sum[0]), float(rows.rescale[0])) == (*kept, 1.0)
