"""Latencies and outcomes of the last minutes, in memory that does not grow with the load. Pure.

1. `record` takes one ended request into the slice of the present seconds.
2. Slices older than the window fall out; what they held is subtracted from the running totals.
3. `totals` and `series` read percentiles, attainment and rates off, without visiting requests.

A latency is kept as the number of its bin; bins grow by 8 %, so a percentile read here is within 4 % of the
exact one. Memory: `NUM_SLICES` slices of at most `NUM_BINS` counts each.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.latency_targets import LatencyTargets
from router.lanes import End

SLICE_S = 5.0
NUM_SLICES = 60
FLOOR_S = 1e-4
BIN_RATIO = 1.08
NUM_BINS = 210  # up to about 1000 s
PERCENTILES = (50, 95, 99)

_LOG_RATIO = math.log(BIN_RATIO)
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Sample:
    """One ended request. `tpot_s` is None for fewer than two tokens."""

    end: End
    num_tokens: int
    ttft_s: float | None
    tpot_s: float | None


def bin_of(seconds: float) -> int:
    """seconds |-> bin, monotonic; out of range goes to the first or last."""
    if seconds <= FLOOR_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(math.log(seconds / FLOOR_S) / _LOG_RATIO))


def value_of(index: int) -> float:
    """The middle of a bin in seconds."""
    return FLOOR_S if index == 0 else FLOOR_S * BIN_RATIO ** (index - 0.5)


def percentile(counts: Mapping[int, int], percent: float) -> float | None:
    """Seconds below which `percent` % of the counted lie (nearest rank); None if nothing was counted."""
    rank = math.ceil(sum(counts.values()) * percent / 100)
    for index in sorted(counts):
        rank -= counts[index]
        if rank <= 0 < counts[index]:
            return value_of(index)
    return None


@dataclass(frozen=True, slots=True)
class WindowPoint:
    """One slice of the window; None where nothing ended."""

    num_ended: int
    attainment: float | None
    num_tokens: int
    ttft_p95_s: float | None
    tpot_p95_s: float | None


@dataclass(slots=True)
class _Slice:
    """Requests that ended within one slice of time; also the shape of the totals."""

    number: int  # time // SLICE_S
    num_ended: Counter[End] = field(default_factory=Counter)
    num_good: int = 0
    num_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    tpot: Counter[int] = field(default_factory=Counter)
    point: WindowPoint | None = None  # what the series shows of it; None after a change

    def add(self, other: _Slice, sign: int) -> None:
        self.point = None
        self.num_good += sign * other.num_good
        self.num_tokens += sign * other.num_tokens
        _merge(self.num_ended, other.num_ended, sign)
        _merge(self.ttft, other.ttft, sign)
        _merge(self.tpot, other.tpot, sign)

    @property
    def num_judged(self) -> int:
        """Those that count for or against us."""
        return self.num_ended[End.FINISHED] + self.num_ended[End.FAILED]

    @property
    def attainment(self) -> float | None:
        return self.num_good / self.num_judged if self.num_judged else None


def _merge(into: Counter[_Key], other: Counter[_Key], sign: int) -> None:
    for key, number in other.items():
        into[key] += sign * number
        if not into[key]:
            del into[key]


@dataclass(frozen=True, slots=True)
class WindowTotals:
    """The whole window. Percentiles map 50, 95, 99 |-> seconds, None where nothing was measured."""

    seconds: float  # that the window has covered so far
    num_finished: int
    num_failed: int
    num_left: int
    num_good: int
    attainment: float | None  # good / (finished + failed)
    num_tokens: int
    ttft_s: Mapping[int, float | None]
    tpot_s: Mapping[int, float | None]


class LatencyWindow:
    """Owns the ring of slices. `now` may repeat but not go back; what is late counts as now."""

    def __init__(self, targets: LatencyTargets, now: float = 0.0) -> None:
        self.targets = targets
        self._began_at = now
        self._slices: deque[_Slice] = deque()
        self._totals = _Slice(0)
        self._number = int(now // SLICE_S)

    def record(self, sample: Sample, now: float) -> None:
        self.advance(now)
        part = _Slice(self._number)
        part.num_ended[sample.end] = 1
        part.num_tokens = sample.num_tokens
        part.num_good = sample.end is End.FINISHED and self.targets.both_met(sample.ttft_s, sample.tpot_s)
        if sample.end is not End.LEFT:  # a client that gives up early would make us look fast
            if sample.ttft_s is not None:
                part.ttft[bin_of(sample.ttft_s)] = 1
            if sample.tpot_s is not None:
                part.tpot[bin_of(sample.tpot_s)] = 1
        if not self._slices or self._slices[-1].number != self._number:
            self._slices.append(_Slice(self._number))
        self._slices[-1].add(part, 1)
        self._totals.add(part, 1)

    def advance(self, now: float) -> None:
        """Let fall out what is too old."""
        self._number = max(self._number, int(now // SLICE_S))
        while self._slices and self._slices[0].number <= self._number - NUM_SLICES:
            self._totals.add(self._slices.popleft(), -1)

    def totals(self, now: float) -> WindowTotals:
        self.advance(now)
        all_ = self._totals
        return WindowTotals(
            seconds=max(SLICE_S, min(NUM_SLICES * SLICE_S, now - self._began_at)),
            num_finished=all_.num_ended[End.FINISHED],
            num_failed=all_.num_ended[End.FAILED],
            num_left=all_.num_ended[End.LEFT],
            num_good=all_.num_good,
            attainment=all_.attainment,
            num_tokens=all_.num_tokens,
            ttft_s={percent: percentile(all_.ttft, percent) for percent in PERCENTILES},
            tpot_s={percent: percentile(all_.tpot, percent) for percent in PERCENTILES},
        )

    def series(self, now: float) -> Sequence[WindowPoint]:
        """`NUM_SLICES` points, oldest first; the last one is still being filled."""
        self.advance(now)
        by_number = {part.number: part for part in self._slices}
        numbers = range(self._number - NUM_SLICES + 1, self._number + 1)
        return [_point(by_number.get(number)) for number in numbers]


_NO_POINT = WindowPoint(0, None, 0, None, None)


def _point(part: _Slice | None) -> WindowPoint:
    if part is None:
        return _NO_POINT
    if part.point is None:
        part.point = WindowPoint(
            num_ended=sum(part.num_ended.values()),
            attainment=part.attainment,
            num_tokens=part.num_tokens,
            ttft_p95_s=percentile(part.ttft, 95),
            tpot_p95_s=percentile(part.tpot, 95),
        )
    return part.point
