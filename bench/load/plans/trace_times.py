"""What is odd about the timestamps of a trace: rows out of order, and holes in which nothing comes. Pure.

A hole is a gap of more than `HOLE` times the mean of the ordinary gaps. Gaps of a Poisson process reach ln(n)
times their mean, 14 in a million; bursty traffic rests longer, but hardly so long. At most a tenth of the
gaps are holes: what is more frequent is the trace's rhythm. Rows of one timestamp have no gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOLE = 30.0  # times the mean gap
MAX_SHARE = 0.1  # of all gaps
MIN_GAPS = 5


@dataclass(frozen=True, slots=True)
class Holes:
    """Trace time, in seconds."""

    num: int
    total_s: float
    longest_s: float
    longest_from_s: float  # the time of the last row before the longest one


def num_out_of_order(times_s: Iterable[float]) -> int:
    """How many rows are earlier than one above them."""
    num, latest_s = 0, -float("inf")
    for time_s in times_s:
        num += time_s < latest_s
        latest_s = max(latest_s, time_s)
    return num


def find_holes(times_s: Sequence[float]) -> Holes | None:
    """`times_s` in order. None: there are none, or too few rows to say."""
    gaps = sorted((later - one, -one) for one, later in itertools.pairwise(times_s) if later > one)
    if len(gaps) < MIN_GAPS:
        return None
    most = max(1, int(MAX_SHARE * len(gaps)))
    first = len(gaps)  # of the holes, among the gaps by size
    total_s = sum(gap_s for gap_s, _ in gaps)
    for position in range(len(gaps) - 1, len(gaps) - 1 - most, -1):
        total_s -= gaps[position][0]
        if gaps[position][0] > HOLE * total_s / position:
            first = position
    if first == len(gaps):
        return None
    longest_s, minus_from_s = gaps[-1]  # the first of equals
    total_s = sum(gap_s for gap_s, _ in gaps[first:])
    return Holes(len(gaps) - first, total_s, longest_s, -minus_from_s)
