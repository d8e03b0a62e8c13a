"""Quantiles of any number of seconds in bounded memory: exact while there are few, else to within 0.5 %.

1. `add` collects values. Up to `EXACT` of them are kept, and every figure is exact.
2. Beyond that they are counted in buckets whose bounds grow by 1 %, from a microsecond to 10,000 s. A
   quantile is then the middle (geometric) of the bucket that it falls into: off by a factor of 1.005 at most,
   for values within those bounds. Number, mean and maximum stay exact.
3. `merged` puts together what several processes have collected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

EXACT = 20_000
_LEAST_S, _MOST_S, _GROWTH = 1e-6, 1e4, 1.01
_NUM_BUCKETS = math.ceil(math.log(_MOST_S / _LEAST_S) / math.log(_GROWTH))
ERROR = math.sqrt(_GROWTH) - 1  # of a quantile, relative, once values are counted


class Collected(msgspec.Struct):
    """`values` not yet counted; `counts` by bucket, empty while all values are kept."""

    num: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    values: list[float] = []
    counts: list[int] = []


class Quantiles:
    """Owns what was collected of one figure."""

    def __init__(self, collected: Collected | None = None) -> None:
        self._sums = collected or Collected()
        self._values = self._sums.values
        self._counts = np.array(self._sums.counts, dtype=np.int64)

    @classmethod
    def merged(cls, parts: Iterable[Collected]) -> Quantiles:
        """All parts as one."""
        whole = cls()
        for part in parts:
            if part.counts:
                whole._count_all()
                whole._counts += np.array(part.counts, dtype=np.int64)
            whole._values += part.values
            whole._sums.num += part.num
            whole._sums.total_s += part.total_s
            whole._sums.max_s = max(whole._sums.max_s, part.max_s)
            if len(whole._values) > EXACT:
                whole._count_all()
        return whole

    @property
    def is_exact(self) -> bool:
        return not len(self._counts)

    def add(self, seconds: NDArray[np.float64]) -> None:
        """Some values."""
        if not len(seconds):
            return
        sums = self._sums
        sums.num += len(seconds)
        sums.total_s += float(seconds.sum())
        sums.max_s = max(sums.max_s, float(seconds.max()))
        self._values += seconds.tolist()
        if len(self._values) > EXACT:
            self._count_all()

    def collected(self) -> Collected:
        """To send elsewhere."""
        sums = self._sums
        return Collected(sums.num, sums.total_s, sums.max_s, self._values, self._counts.tolist())

    def at(self, percent: float) -> float | None:
        """None without values."""
        if not self._sums.num:
            return None
        if self.is_exact:
            return float(np.percentile(self._values, percent))
        self._count_all()
        rank = percent / 100 * (self._sums.num - 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return min(_LEAST_S * math.exp((bucket + 0.5) * math.log(_GROWTH)), self._sums.max_s)

    def figures(self, percents: Iterable[float]) -> dict[str, float | int | bool | None]:
        """As a result file has them."""
        sums = self._sums
        return {
            "num": sums.num,
            "mean_s": sums.total_s / sums.num if sums.num else None,
            **{f"p{percent:g}_s": self.at(percent) for percent in percents},
            "max_s": sums.max_s if sums.num else None,
            "is_exact": self.is_exact,
        }

    def _count_all(self) -> None:
        """From kept to counted."""
        if self.is_exact:
            self._counts = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        if self._values:
            values = np.clip(self._values, _LEAST_S, _MOST_S * 0.999)
            buckets = (np.log(values / _LEAST_S) / math.log(_GROWTH)).astype(np.int64)
            self._counts += np.bincount(buckets, minlength=_NUM_BUCKETS)
            self._values.clear()
