"""Choosing ids from one row of numbers: weights, the largest few, a nucleus, a draw. NumPy, row by row.

This is the definition; `kernels/cpu/sampling.cpp` computes the same bits. Two choices make that possible on
any machine, in any order, with any vector width:

1. `weigh` is a polynomial of single multiplications and additions (no library's exponential, nothing fused).
2. Weights are multiples of 2^-34, so sums of up to `MAX_EXACT_SIZE` of them are exact in fp64. A weight is in
   [0, 1] with the largest at 1: what the grid loses is less than fp32 sums would.

The vocabulary is not sorted: the largest few are found through the maxima of lanes, which reads the row
twice, and a nucleus is widened step by step until it holds enough mass.

Order everywhere: larger score first, among equal scores the lower id first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

MAX_EXACT_SIZE = 1 << 19  # numbers in [0, 1] on a grid of 2^-34: their sum stays below 2^53 steps
_LANE = 64  # numbers per lane
_NUCLEUS_WIDTHS = (64, 512, 4096)  # tried in turn before the whole row

_LOWEST = np.float32(-25.0)  # e^-25 is less than half a step of the grid
_LOG2_E = np.float32(1.44269504088896341)
_TO_INTEGER = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(2.12194440e-4)  # ln 2 = high - low
_TERMS = tuple(  # Cephes' expf: (e^r - 1 - r) / r^2 for |r| <= ln2 / 2
    np.float32(term)
    for term in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_TO_GRID = np.float32(2.0**-11)  # what is below, plus this, is a multiple of 2^-34


def weigh(scores: Row, peak: np.float32, temperature: np.float32) -> Row:
    """exp((score - peak) · 1/temperature), rounded to a multiple of 2^-34: unnormalized probabilities.

    `peak` is finite and at least every score; `temperature` is positive and finite; -inf weighs 0.
    """
    x = (scores - peak) * (np.float32(1.0) / temperature)
    np.maximum(x, _LOWEST, out=x)
    shifted = x * _LOG2_E
    np.add(shifted, _TO_INTEGER, out=shifted)
    n = shifted - _TO_INTEGER
    np.subtract(x, n * _LN2_HIGH, out=x)
    np.add(x, n * _LN2_LOW, out=x)
    result = np.full_like(x, _TERMS[0])
    for term in _TERMS[1:]:
        np.multiply(result, x, out=result)
        np.add(result, term, out=result)
    np.multiply(result, x * x, out=result)
    np.add(result, x, out=result)
    np.add(result, np.float32(1.0), out=result)
    exponents = result.view(np.int32)
    np.add(exponents, (shifted.view(np.int32) - _TO_INTEGER.view(np.int32)) << 23, out=exponents)
    on_grid = result + _TO_GRID
    np.subtract(on_grid, _TO_GRID, out=on_grid)
    np.copyto(result, on_grid, where=result < _TO_GRID)
    return result


def total(weights: Row) -> float:
    """The sum of weights from `weigh`; exact."""
    return float(weights.sum(dtype=np.float64))


def largest(row: Row, count: int) -> Ids:
    """Ids of the `count` largest numbers (all, if there are fewer), in order. `row` has no NaN."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= len(row):
        return _in_order(row, np.arange(len(row)))[:count]
    candidates = np.flatnonzero(row >= _floor_of_largest(row, count))
    return _in_order(row[candidates], candidates)[:count]


def _floor_of_largest(row: Row, count: int) -> np.float32:
    """A number that at least `count` numbers of the row reach, close to the `count`-th largest."""
    num_lanes = len(row) // _LANE
    if count < num_lanes - num_lanes // 8:
        # `count` lanes have a maximum of at least this, so `count` numbers do.
        row = row[: num_lanes * _LANE].reshape(_LANE, num_lanes).max(axis=0)
    floor: np.float32 = np.partition(row, len(row) - count)[len(row) - count]
    return floor


def _in_order(values: Row, ids: Ids) -> Ids:
    """`ids` ordered by their values, through one sort of 64-bit keys (value descending, id ascending)."""
    bits = (values + np.float32(0.0)).view(np.int32)  # adding 0 makes -0.0 the same as 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (-1 - ascending.astype(np.int64)) << 32 | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def nucleus(scores: Row, weights: Row, mass: float) -> Ids:
    """Ids, in order of score, of the fewest first ones whose weights reach `mass` of the total; at least one.

    `weights` are those of `scores`, with a positive total; `mass` is below 1.
    """
    target = mass * total(weights)
    for width in (*_NUCLEUS_WIDTHS, len(scores)):
        ids = largest(scores, width)
        reached = np.cumsum(weights[ids], dtype=np.float64) >= target
        if reached[-1]:
            break
    return ids[: int(reached.argmax()) + 1] if reached[-1] else ids


def draw(weights: Row, u: float) -> int:
    """The index i whose share of the running sum, in index order, holds `u` times the total (inverse CDF).

    `u` in [0, 1); `weights` have a positive total. An index of weight 0 is never drawn.
    """
    upto = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(upto, u * float(upto[-1]), side="right"))
    # `u` times the total may round to the total
    return index if index < len(upto) else int(np.flatnonzero(weights)[-1])
