"""Figures of workers: how they are worked out and compared, the same for three workers and for a thousand.

1. A *figure* is a number of one worker (`Few`), or the column of all (`Many`). A formula is written once: it
   gets figures, uses operators, and asks the pool for what operators do not say (`at_most`, `instead`).
2. A *column* is a list of numbers (`Few`) or an array (`Many`). `map` applies a formula to columns.
3. What is chosen by columns (`lowest`, `near`, `oldest`) goes on as a few row numbers.

An operation on a short array costs nearly a microsecond, fifteen times one on a number: so a few workers are
looked at one after the other. With a thousand, it costs a microsecond too, and its overhead is most of that;
numpy's own `min` and `any` cost three, `where` four. So minima are looked up by `argmin`, flags as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Few:
    """Each worker by itself."""

    at_most: Callable[[Figure, Figure], Figure] = min
    at_least: Callable[[Figure, Figure], Figure] = max
    is_some: Callable[[Figure], bool] = bool  # a formula's flag is set for any of those it is about
    is_every: Callable[[Figure], bool] = bool  # it is for all of them

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
    def near(cost: Figures, share: float) -> Chosen:
        """Rows whose cost is within this share of the least."""
        most = min(cost) * (1 + share)
        return [row for row, each in enumerate(cost) if each <= most]

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

    at_most: Callable[[Figure, Figure], Figure] = np.minimum
    at_least: Callable[[Figure, Figure], Figure] = np.maximum
    is_some: Callable[[Flags], bool] = staticmethod(is_any)
    is_every: Callable[[Flags], bool] = staticmethod(are_all)
    any: Callable[[Flags], bool] = staticmethod(is_any)
    all: Callable[[Flags], bool] = staticmethod(are_all)

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
    def instead(figure: Figure, flags: Figure, other: Figure) -> Figure:
        return np.where(flags, other, figure) if is_any(flags) else figure

    @staticmethod
    def unless(figure: Figure, flags: Figure, other: Figure) -> Figure:
        return figure if are_all(flags) else np.where(flags, figure, other)

    @staticmethod
    def is_out(flags: Figure) -> bool:
        return False

    @staticmethod
    def lowest(column: Column) -> float:
        return column.item(column.argmin())

    @staticmethod
    def only(flags: Flags) -> int:
        as_bytes = flags.tobytes()
        return as_bytes.index(1) if as_bytes.count(1) == 1 else NONE

    @staticmethod
    def near(cost: Column, share: float) -> Rows:
        rows: Rows = (cost <= cost.item(cost.argmin()) * (1 + share)).nonzero()[0]
        return rows

    def oldest_of(self, rows: Chosen, score: Column, share: float, preferred: int) -> int:
        best = rows[self.near(score[rows], share)]
        if preferred != NONE and preferred in best:
            return preferred
        return int(best[self.workers.last_placed[best].argmin()])


Pool = Few | Many


def pool_of(fleet: Fleet) -> Pool:
    """The workers as of now."""
    return Few(fleet) if fleet.num_workers <= FEW else Many(fleet)
