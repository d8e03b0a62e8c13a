"""Choosing ids from one row of numbers: the largest few, a nucleus, a draw. NumPy on one row at a time.

Every function is a fixed sequence of operations on one contiguous row, on one thread, so its bits depend on
that row alone. The vocabulary is not sorted: the largest few are found through the maxima of lanes, which
reads the row twice, and a nucleus is widened step by step until it holds enough mass.

Order everywhere: larger number first, among equal numbers the lower id first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_BLOCK = 64  # numbers per lane and per block
_NUCLEUS_WIDTHS = (64, 512, 4096)  # tried in turn before the whole row


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
    lanes = _lanes(row)
    num_lanes = lanes.shape[1]
    if count < num_lanes - num_lanes // 8:
        # `count` lanes have a maximum of at least this, so `count` numbers do.
        row = lanes.max(axis=0)
    floor: np.float32 = np.partition(row, len(row) - count)[len(row) - count]
    return floor


def _in_order(values: Row, ids: Ids) -> Ids:
    """`ids` ordered by their values, through one sort of 64-bit keys (value descending, id ascending)."""
    bits = (values + np.float32(0.0)).view(np.int32)  # adding 0 makes -0.0 the same as 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (-1 - ascending.astype(np.int64)) << 32 | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def nucleus(weights: Row, mass: float) -> Ids:
    """Ids, in order, of the fewest largest weights whose sum reaches `mass` of the total; at least one.

    `weights` are non-negative with a positive total. Sums of the kept are in fp64, in order.
    """
    target = mass * total(weights)
    for width in (*_NUCLEUS_WIDTHS, len(weights)):
        ids = largest(weights, width)
        reached = np.cumsum(weights[ids], dtype=np.float64) >= target
        if reached[-1]:
            return ids[: int(reached.argmax()) + 1]
        if width >= len(weights):
            break
    return ids  # rounding: a target of about everything is not reached by summing in this order


def total(weights: Row) -> float:
    """The sum of a row: lanes of 64 in fp32, then over lanes and the rest in fp64."""
    lanes = _lanes(weights)
    rest = weights[lanes.size :]
    return float(lanes.sum(axis=0).sum(dtype=np.float64) + rest.sum(dtype=np.float64))


def draw(weights: Row, u: float) -> int:
    """The index i whose share of the running sum, in index order, holds `u` times the total (inverse CDF).

    `u` in [0, 1); `weights` are non-negative with a positive total. An index of weight 0 is never drawn.
    """
    num_blocks = len(weights) // _BLOCK
    sums = np.append(
        weights[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).sum(axis=1),
        weights[num_blocks * _BLOCK :].sum(),
    )
    upto = np.cumsum(sums, dtype=np.float64)
    threshold = u * float(upto[-1])
    block = _first_above(upto, threshold, sums)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = float(upto[block - 1]) if block else 0.0
    return block * _BLOCK + _first_above(np.cumsum(inside, dtype=np.float64), threshold - before, inside)


def _first_above(upto: NDArray[np.float64], threshold: float, weights: NDArray[Any]) -> int:
    """The first index whose running sum exceeds the threshold; where rounding leaves none, the last index
    with any weight."""
    index = int(np.searchsorted(upto, threshold, side="right"))
    return index if index < len(upto) else int(np.flatnonzero(weights)[-1])


def _lanes(row: Row) -> Row:
    """[64, num_lanes] view of all but the last few numbers: lane j holds ids j, j + num_lanes, ... Reducing
    over axis 0 runs over whole vectors, several times faster than over consecutive blocks."""
    num_lanes = len(row) // _BLOCK
    return row[: num_lanes * _BLOCK].reshape(_BLOCK, num_lanes)
