"""Numbers to pixels, and the round numbers an axis shows.

1. A chart finds the extent of its data and widens it to round ends (`LinearScale.nice`, `LogScale.nice`).
2. The scale maps a value to a pixel; `ticks` are the values worth a grid line: 1, 2, 5 times a power of ten.
3. `tick_label` and `quantity` write numbers for axes and for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_TICKS = 200
LEAST_EXTENT = 1e-300  # narrower ones have no tick step that is an ordinary float


class Scale(Protocol):
    """A monotonic map of values to pixels; a value outside the domain is drawn at its nearest end."""

    def __call__(self, value: float) -> float: ...

    def ticks(self, num: int) -> list[float]: ...


def nice_step(span: float, num: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that cuts `span` into at most `num` pieces."""
    raw = span / max(num, 1)
    if not math.isfinite(raw) or raw <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    if power == 0.0:  # below the smallest float with a decade of its own
        return raw
    for factor in (1.0, 2.0, 5.0, 10.0):
        if raw <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


def nice_ticks(lo: float, hi: float, num: int) -> list[float]:
    """Multiples of a nice step inside [lo, hi], at most `num` + 1 of them; [lo] where lo == hi."""
    if not (math.isfinite(lo) and math.isfinite(hi)):
        return []
    if lo > hi:
        lo, hi = hi, lo
    step = nice_step(hi - lo, num)
    if hi == lo or lo + step == lo or hi + step == hi:
        return [lo]
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    return [_snap(i * step, step) for i in range(first, min(last, first + MAX_TICKS) + 1)]


def log_ticks(lo: float, hi: float, num: int = 8) -> list[float]:
    """1, 2, 5 of each decade inside [lo, hi] where they fit `num`, else the powers of ten, thinned evenly."""
    if not (0 < lo <= hi and math.isfinite(hi)):
        return []
    exponents = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    inside = (lo * (1 - 1e-9), hi * (1 + 1e-9))
    for factors in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [f * 10.0**e for e in exponents for f in factors if inside[0] <= f * 10.0**e <= inside[1]]
        if len(ticks) <= num:
            break
    return ticks[:: max(1, math.ceil(len(ticks) / max(num, 1)))]


@dataclass(frozen=True, slots=True)
class LinearScale:
    lo: float
    hi: float
    start_px: float
    end_px: float
    is_whole: bool = False  # ticks at whole numbers only

    @classmethod
    def nice(cls, lo: float, hi: float, start_px: float, end_px: float, num: int = 5) -> LinearScale:
        """Ends moved out to multiples of the tick step. An empty extent begins at 0, or has unit width."""
        if hi - lo < LEAST_EXTENT:
            lo, hi = min(lo, 0.0), max(hi, 0.0)
        if hi - lo < LEAST_EXTENT:
            lo, hi = 0.0, 1.0
        step = nice_step(hi - lo, num)
        lo, hi = math.floor(lo / step + 1e-9) * step, math.ceil(hi / step - 1e-9) * step
        return cls(_snap(lo, step), _snap(hi, step), start_px, end_px)

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.lo), self.hi) - self.lo) / (self.hi - self.lo)
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self, num: int) -> list[float]:
        ticks = nice_ticks(self.lo, self.hi, num)
        return [tick for tick in ticks if tick == round(tick)] if self.is_whole else ticks


@dataclass(frozen=True, slots=True)
class LogScale:
    lo: float
    hi: float
    start_px: float
    end_px: float

    @classmethod
    def nice(cls, lo: float, hi: float, start_px: float, end_px: float) -> LogScale:
        """Ends moved out to 1, 2 or 5 times a power of ten; `lo` must be positive."""
        below = [t for t in _decade(lo) if t <= lo * (1 + 1e-9)]
        above = [t for t in _decade(hi) if t >= hi * (1 - 1e-9)]
        low, high = max(below), min(above)
        return cls(low, high if high > low else low * 10, start_px, end_px)

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.lo), self.hi)
        share = math.log(inside / self.lo) / math.log(self.hi / self.lo)
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self, num: int) -> list[float]:
        return log_ticks(self.lo, self.hi, num)


def _decade(value: float) -> list[float]:
    exponent = math.floor(math.log10(value))
    return [f * 10.0**e for e in (exponent - 1, exponent, exponent + 1) for f in (1.0, 2.0, 5.0)]


def _snap(value: float, step: float) -> float:
    """`value` without the rounding dust below a thousandth of `step` (0.30000000000000004 → 0.3)."""
    digits = 3 - math.floor(math.log10(step)) if step > 0 else 3
    return round(value, digits) + 0.0 if -300 < digits < 300 else value


def extent(values: Iterable[float]) -> tuple[float, float] | None:
    """Least and greatest of the finite values; None where there is none."""
    finite = [v for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else None


def tick_label(value: float) -> str:
    """Short and exact enough for an axis: 0.05, 1.5, 200, 20,000, 3M."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M")):
        if limit <= size < limit * 1e4:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:,.0f}" if 1e3 <= size < 1e6 and value == round(value) else f"{value:.6g}"


def quantity(value: float, unit: str = "") -> str:
    """Three significant digits and thousands separators, as a person writes it: 0.0512, 4.21, 1,235 tok/s."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        text = f"{value:.2e}"
    elif size >= 100 or value == round(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{2 - math.floor(math.log10(size))}f}"
        text = text.rstrip("0").rstrip(".") if size < 1 else text
    if unit == "%":
        return f"{text} %"
    return f"{text} {unit}" if unit else text


def aligned(values: Sequence[float | None]) -> list[str]:
    """A column of numbers with equally many decimals, as few as its greatest value allows; "–" for None."""
    present = [value for value in values if value is not None and math.isfinite(value)]
    greatest = max((abs(value) for value in present), default=0.0)
    is_whole = all(value == round(value) for value in present)
    decimals = 0 if is_whole or greatest >= 1e3 else 1 if greatest >= 10 else 2 if greatest >= 1 else 3
    return [
        "–" if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}" for value in values
    ]


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 850 µs, 12.5 ms, 1.24 s, 12 min 5 s."""
    size = abs(seconds)
    if size < 1e-3 and size > 0:
        return quantity(seconds * 1e6, "µs")
    if size < 1:
        return quantity(seconds * 1e3, "ms")
    if size < 120:
        return quantity(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s"
