"""Choosing workers by a column of figures, in as few and cheap vector operations as it takes.

With a thousand workers an operation costs about a microsecond, and its overhead is most of that; numpy's own
`min` and `any` cost three, `where` four. So minima are looked up by `argmin`, flags as bytes, and what is
chosen goes on as a few row numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.fleet import Column, Flags, Fleet

Rows = NDArray[np.intp]  # numbers of some workers, rising
NONE = -1  # no row


def is_any(flags: Flags) -> bool:
    """As `flags.any()`."""
    return 1 in flags.tobytes()


def are_all(flags: Flags) -> bool:
    """As `flags.all()`."""
    return 0 not in flags.tobytes()


def only(flags: Flags) -> int:
    """The one row that is set; `NONE` if there are others, or none."""
    as_bytes = flags.tobytes()
    return as_bytes.index(1) if as_bytes.count(1) == 1 else NONE


def lowest(column: Column) -> float:
    """As `column.min()`."""
    return column.item(column.argmin())


def highest(column: Column) -> float:
    """As `column.max()`."""
    return column.item(column.argmax())


def near(cost: Column, share: float) -> Rows:
    """Those whose cost is within this share of the least."""
    rows: Rows = (cost <= lowest(cost) * (1 + share)).nonzero()[0]
    return rows


def oldest(score: Column, fleet: Fleet, share: float, preferred: int = NONE) -> int:
    """Of those whose score is within this share of the least: the preferred one, else the one that was placed
    on longest ago."""
    return _oldest(near(score, share), fleet, preferred)


def oldest_of(rows: Rows, score: Column, fleet: Fleet, share: float, preferred: int = NONE) -> int:
    """As `oldest`, of these rows. `score`: of all."""
    return _oldest(rows[near(score[rows], share)], fleet, preferred)


def _oldest(rows: Rows, fleet: Fleet, preferred: int) -> int:
    if preferred != NONE and preferred in rows:
        return preferred
    return int(rows[fleet.last_placed[rows].argmin()])
