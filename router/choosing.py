"""Figures of workers: how they are worked out and compared, the same for three workers and for a thousand.

1. A *figure* is a number of one worker (`Few`), or the column of all (`Many`). A formula is written once: it
   gets figures, uses operators, and asks the pool for what operators do not say (`at_most`, `instead`).
2. A *column* is a list of numbers (`Few`) or an array (`Many`). `map` applies a formula to columns.
3. What is chosen by columns (`lowest`, `near`, `oldest`) goes on as a few row numbers.

An operation on a short array costs a quarter of a microsecond, six times one on a number: so a few workers
are looked at one after the other. With a thousand it costs half of one, most of it overhead. A Python number
as operand adds a third, an integer more (`one` and `number` do not); `min`, `any`, `where` and a bound by a
number cost two to four such operations. So minima are looked up by `argmin`, flags as bytes, a bound is
applied only where it binds, and rows are masked only if one that may not be chosen would be.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from router.fleet import Column, Flags, Fleet, Worker

NONE: Final = -1  # no row
FEW: Final = 10  # workers up to which each by itself is faster
Rows = NDArray[np.intp]  # numbers of some workers, rising
Figure = Any  # a number of one worker, or the column of all; a flag, or the flags of all
Figures = Any  # a column
Chosen = Any  # row numbers, rising: a list of them, or an array


def is_any(flags: Flags) -> bool:
    """As `flags.any()`."""
    return 1 in flags.tobytes()


def are_all(flags: Flags) -> bool:
    """As `flags.all()`."""
    return 0 not in flags.tobytes()


def highest(column: Column) -> float:
    """As `column.max()`."""
    return column.item(column.argmax())


def lowest(column: Column) -> float:
    """As `column.min()`."""
    return column.item(column.argmin())


def _number(value: float) -> Column:
    return np.array(value, dtype=np.float64)


class Few:
    """Each worker by itself."""

    one: Figure = 1  # as operand of a figure
    number: Callable[[float], Figure] = (
        float  # the same, of any; worth it for one that is used more than once
    )
    at_most: Callable[[Figure, Figure], Figure] = min
    at_least: Callable[[Figure, Figure], Figure] = max
    is_some: Callable[[Figure], bool] = bool  # a formula's flag is set for any of those it is about
    is_every: Callable[[Figure], bool] = bool  # it is for all of them
    most: Callable[[Figure], float] = float  # of a figure, among those
    least: Callable[[Figure], float] = float

    def __init__(self, fleet: Fleet) -> None:
        self.workers = fleet.workers()

    def worker(self, row: int) -> Worker:
        return self.workers[row]

    def column(self, column: Column | Flags | None) -> Figures:
        """What is kept as an array, one entry per worker."""
        return [None] * len(self.workers) if column is None else column.tolist()

    def same(self, value: object) -> Figures:
        """One value for all."""
        return [value] * len(self.workers)

    @staticmethod
    def map(formula: Callable[..., Figure], *columns: Figures) -> Figures:
        return list(map(formula, *columns))

    @staticmethod
    def instead(figure: Figure, flag: Figure, other: Figure) -> Figure:
        """`other` where `flag` is set."""
        return other if flag else figure

    @staticmethod
    def unless(figure: Figure, flag: Figure, other: Figure) -> Figure:
        """`other` where `flag` is not set."""
        return figure if flag else other

    @staticmethod
    def either(flag: Figure, value: float, other: float) -> Figure:
        """`value` where `flag` is set, else `other`."""
        return value if flag else other

    @staticmethod
    def is_out(flag: Figure) -> bool:
        """Nothing needs to be worked out where `flag` is not set."""
        return not flag

    @staticmethod
    def any(flags: Figures) -> bool:
        return True in flags

    @staticmethod
    def all(flags: Figures) -> bool:
        return False not in flags

    @staticmethod
    def lowest(column: Figures) -> float:
        least: float = min(column)
        return least

    @staticmethod
    def only(flags: Figures) -> int:
        """The one row that is set; `NONE` if there are others, or none."""
        if flags.count(True) != 1:
            return NONE
        row: int = flags.index(True)
        return row

    @staticmethod
    def near(cost: Figures, share: float, among: Figures) -> Chosen:
        """Of the rows that are set in `among`, some, those whose cost is within this share of the least."""
        most = min(compress(cost, among)) * (1 + share)
        return [row for row, each in enumerate(cost) if among[row] and each <= most]

    def oldest_of(self, rows: Chosen, score: Figures, share: float, preferred: int) -> int:
        """Of these rows, and of those whose score is within this share of the least: the preferred one, else
        the one that was placed on longest ago."""
        most = min([score[row] for row in rows]) * (1 + share)
        best: list[int] = [row for row in rows if score[row] <= most]
        if preferred in best:
            return preferred
        return min(best, key=self._last_placed)

    def _last_placed(self, row: int) -> float:
        return self.workers[row].last_placed


class Many:
    """All workers at once; methods as those of `Few`."""

    one: Figure = np.array(1.0)
    number: Callable[[float], Figure] = staticmethod(_number)
    is_some: Callable[[Flags], bool] = staticmethod(is_any)
    is_every: Callable[[Flags], bool] = staticmethod(are_all)
    most: Callable[[Figure], float] = staticmethod(highest)
    least: Callable[[Figure], float] = staticmethod(lowest)
    any: Callable[[Flags], bool] = staticmethod(is_any)
    all: Callable[[Flags], bool] = staticmethod(are_all)
    lowest: Callable[[Column], float] = staticmethod(lowest)

    def __init__(self, fleet: Fleet) -> None:
        self.workers = fleet

    def worker(self, row: int) -> Worker:
        return self.workers.worker(row)

    @staticmethod
    def column(column: Column | Flags | None) -> Figures:
        return column

    @staticmethod
    def same(value: object) -> Figures:
        return value

    @staticmethod
    def map(formula: Callable[..., Figure], *columns: Figures) -> Figures:
        return formula(*columns)

    @staticmethod
    def at_most(figure: Column, other: Figure) -> Figure:
        """May be `figure` itself."""
        if isinstance(other, float) and highest(figure) <= other:
            return figure
        return np.minimum(figure, other)

    @staticmethod
    def at_least(figure: Column, other: Figure) -> Figure:
        """May be `figure` itself."""
        if isinstance(other, float) and lowest(figure) >= other:
            return figure
        return np.maximum(figure, other)

    @staticmethod
    def instead(figure: Figure, flags: Figure, other: Figure) -> Figure:
        return np.where(flags, other, figure) if is_any(flags) else figure

    @staticmethod
    def unless(figure: Figure, flags: Figure, other: Figure) -> Figure:
        return figure if are_all(flags) else np.where(flags, figure, other)

    def either(self, flags: Flags, value: float, other: float) -> Figure:
        return self.workers.either(flags, value, other)

    @staticmethod
    def is_out(flags: Figure) -> bool:
        return False

    @staticmethod
    def only(flags: Flags) -> int:
        as_bytes = flags.tobytes()
        row = as_bytes.find(1)  # NONE if there is none
        return row if as_bytes.find(1, row + 1) == NONE else NONE

    @staticmethod
    def near(cost: Column, share: float, among: Flags) -> Rows:
        row = cost.argmin()
        least = cost.item(row)
        rows = _within(cost, least * (1 + share), among)
        if among.item(row):
            return rows
        least_among = lowest(cost[rows if len(rows) else among])
        return rows if least_among == least else _within(cost, least_among * (1 + share), among)

    def oldest_of(self, rows: Chosen, score: Column, share: float, preferred: int) -> int:
        score = score[rows]
        best = rows[score <= lowest(score) * (1 + share)]
        if preferred != NONE and preferred in best:
            return preferred
        return int(best[self.workers.last_placed[best].argmin()])


def _within(cost: Column, most: float, among: Flags) -> Rows:
    flags = cost <= most
    flags &= among
    rows: Rows = flags.nonzero()[0]
    return rows


Pool = Few | Many


def pool_of(fleet: Fleet) -> Pool:
    """The workers as of now."""
    return Few(fleet) if fleet.num_workers <= FEW else Many(fleet)
