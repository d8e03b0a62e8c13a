"""Which workers make up which cell of a large fleet (`router.cells`).

1. `follow` is told who is here, by name, row and role; it says whether any cell has changed.
2. A worker that joins goes where there are fewest of its role; one that leaves is taken out. Nobody moves.
3. Cells that became too large or too small are dealt anew, all of them.

Algorithm: cells are alike. Each role's workers are dealt in turn, in the order of their rows, so that workers
that joined one after the other, most likely of one kind, spread over all cells.

Order: by role, then by row. Bounds: O(workers) for a look, O(cells) for each worker that joined. Pure, no
clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cluster.ids import WorkerId
from router.cells import CellSettings


class Member(msgspec.Struct, frozen=True):
    row: int
    is_decode: bool


class CellMembers:
    """Owns who is in which cell."""

    def __init__(self, settings: CellSettings) -> None:
        self._settings = settings
        self._here: dict[WorkerId, Member] = {}
        self._cell_of: dict[WorkerId, int] = {}
        self._counts: list[list[int]] = [[0, 0]]  # by cell: workers of either role

    def __len__(self) -> int:
        """Cells."""
        return len(self._counts)

    def rows(self) -> list[list[int]]:
        """By cell, rising."""
        rows: list[list[int]] = [[] for _ in self._counts]
        for name, cell in self._cell_of.items():
            rows[cell].append(self._here[name].row)
        return [sorted(one) for one in rows]

    def follow(self, here: Mapping[WorkerId, Member]) -> bool:
        """These workers are here now; True if a cell has changed."""
        if here == self._here:
            return False
        before, self._here = self._here, dict(here)
        for name, member in before.items():
            if here.get(name) != member:
                self._counts[self._cell_of.pop(name)][member.is_decode] -= 1
        num_cells = self._num_cells()
        if num_cells != len(self._counts):
            self._counts = [[0, 0] for _ in range(num_cells)]
            self._cell_of = {}
        joined = [(member.is_decode, member.row, name) for name, member in here.items()]
        for is_decode, _, name in sorted(one for one in joined if one[2] not in self._cell_of):
            counts = self._counts
            cell = min(range(len(counts)), key=lambda one: (counts[one][is_decode], sum(counts[one])))
            counts[cell][is_decode] += 1
            self._cell_of[name] = cell
        return True

    def _num_cells(self) -> int:
        """As many as there are, while their mean size is within half of what it should be."""
        settings, num_workers, now = self._settings, len(self._here), len(self._counts)
        if num_workers <= settings.workers or (now == 1 and num_workers <= settings.most_together):
            return 1
        if now > 1 and 0.5 <= num_workers / (now * settings.workers) <= 1.5:
            return now
        return math.ceil(num_workers / settings.workers)
