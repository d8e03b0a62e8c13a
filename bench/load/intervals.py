"""Confidence intervals at 95 %: of a mean over few seeds, and of a share over many requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NORMAL_95 = 1.959964

# Two-sided 95 % quantiles of Student's t for 1 .. 30 degrees of freedom. Beyond, the last one is used.
STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def mean_half_width(values: Sequence[float]) -> float | None:
    """t · s / √n with the sample deviation s; None for fewer than two values."""
    if len(values) < 2:
        return None
    quantile = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def wilson(num_good: float, num: int) -> tuple[float, float] | None:
    """Wilson's score interval of a share; None without trials. Unlike ±z·√(pq/n) it stays inside 0 to 1."""
    if num <= 0:
        return None
    share, z2 = num_good / num, NORMAL_95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2)) / (1 + z2 / num)
    return max(0.0, centre - half), min(1.0, centre + half)
