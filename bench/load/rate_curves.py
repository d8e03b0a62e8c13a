"""Rates over time as values: the integral Λ, and its inverse for whole arrays.

An arrival process of unit rate becomes one of rate λ(t) by sending each of its times through Λ⁻¹.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RateCurve(Protocol):
    """A rate over time, by its integral Λ."""

    def expected(self, time_s: float) -> float:
        """Λ: the expected number of arrivals until `time_s`."""
        ...

    def invert(self, expected: Floats) -> Floats:
        """Λ⁻¹, seconds; infinity where the curve ends before that many arrivals."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantRate:
    rate: float

    def expected(self, time_s: float) -> float:
        return self.rate * time_s

    def invert(self, expected: Floats) -> Floats:
        return expected / self.rate


@dataclass(frozen=True, slots=True)
class LinearRamp:
    """From `start_rate` to `end_rate` over `over_s`, then `end_rate` for good."""

    start_rate: float
    end_rate: float
    over_s: float

    def expected(self, time_s: float) -> float:
        ramp_s = min(time_s, self.over_s)
        slope = (self.end_rate - self.start_rate) / self.over_s
        return (self.start_rate + slope * ramp_s / 2) * ramp_s + self.end_rate * (time_s - ramp_s)

    def invert(self, expected: Floats) -> Floats:
        # start·t + slope·t²/2 = x, solved in the form that neither cancels nor divides by a zero slope
        slope = (self.end_rate - self.start_rate) / self.over_s
        root = np.sqrt(np.maximum(self.start_rate**2 + 2 * slope * expected, 0.0))
        divisor = self.start_rate + root
        within = np.divide(2 * expected, divisor, out=np.zeros_like(expected), where=divisor > 0)
        return _after_ramp(within, expected, self.expected(self.over_s), self.over_s, self.end_rate)


@dataclass(frozen=True, slots=True)
class ExponentialRamp:
    """start · (end / start)^(t / over) until `over_s`, then `end_rate` for good."""

    start_rate: float
    end_rate: float
    over_s: float

    def expected(self, time_s: float) -> float:
        ramp_s = min(time_s, self.over_s)
        growth = math.log(self.end_rate / self.start_rate) / self.over_s
        area = self.start_rate * (math.expm1(growth * ramp_s) / growth if growth else ramp_s)
        return area + self.end_rate * (time_s - ramp_s)

    def invert(self, expected: Floats) -> Floats:
        growth = math.log(self.end_rate / self.start_rate) / self.over_s
        total = self.expected(self.over_s)
        inside = np.minimum(expected, total) / self.start_rate
        within = np.log1p(growth * inside) / growth if growth else inside
        return _after_ramp(within, expected, total, self.over_s, self.end_rate)


@dataclass(frozen=True, slots=True)
class PiecewiseRate:
    """`(duration_s, rate)` one after another; ends with the last piece."""

    pieces: tuple[tuple[float, float], ...]

    def expected(self, time_s: float) -> float:
        total, start_s = 0.0, 0.0
        for duration_s, rate in self.pieces:
            total += rate * min(max(time_s - start_s, 0.0), duration_s)
            start_s += duration_s
        return total

    def invert(self, expected: Floats) -> Floats:
        durations_s, rates = (np.array(column, dtype=np.float64) for column in zip(*self.pieces, strict=True))
        starts_s = np.cumsum(durations_s) - durations_s
        busy = rates > 0
        ends = np.cumsum(durations_s[busy] * rates[busy])
        index = np.searchsorted(ends, expected, side="left")
        clipped = np.minimum(index, len(ends) - 1)
        before = ends[clipped] - (durations_s * rates)[busy][clipped]
        times_s = starts_s[busy][clipped] + (expected - before) / rates[busy][clipped]
        return np.where(index < len(ends), times_s, np.inf)


def _after_ramp(within: Floats, expected: Floats, total: float, over_s: float, end_rate: float) -> Floats:
    later = over_s + (expected - total) / end_rate if end_rate else np.full_like(expected, np.inf)
    return np.where(expected <= total, within, later)
