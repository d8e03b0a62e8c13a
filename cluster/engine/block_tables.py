"""The block tables of a step, kept from the step before: a row that goes on brings at most a block.

1. A row is known by the very list of its blocks, which its sequence owns and only ever appends to. The lists
   of the last step are held here, so another list cannot be taken for one of them.
2. The same lists in the same order: what was appended is copied. Otherwise known rows move to their new
   places first, in one copy, and unknown ones are written whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np
from numpy.typing import NDArray

from cluster.ids import BlockId


class BlockTables:
    def __init__(self) -> None:
        self._table = np.zeros((8, 8), np.int32)
        self._lists: list[Sequence[BlockId]] = []  # of the rows in the table
        self._counts: list[int] = []  # blocks of each that are in the table

    def holds(self, lists: list[Sequence[BlockId]]) -> bool:
        """Whether they are those of the table, in their order, whatever has been appended since."""
        return len(lists) == len(self._lists) and all(map(is_, lists, self._lists))

    def update(self, lists: list[Sequence[BlockId]], counts: list[int]) -> NDArray[np.int32]:
        """Row r holds the `counts[r]` blocks of `lists[r]`, then 0; there may be more rows than lists.

        The array is contiguous and stays the same until it has to grow.
        """
        if len(lists) > self._table.shape[0] or max(counts) > self._table.shape[1]:
            self._grow(len(lists), max(counts))
        if not self.holds(lists):
            self._rearrange(lists)
        if counts != self._counts:
            for row, (old, new) in enumerate(zip(self._counts, counts, strict=True)):
                if old != new:
                    self._table[row, old:new] = lists[row][old:new]
                    self._table[row, new:old] = 0
            self._counts = counts
        return self._table

    def _grow(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._table.shape
        rows = rows if num_rows <= rows else 2 * num_rows
        columns = columns if num_columns <= columns else 2 * num_columns
        table = np.zeros((rows, columns), np.int32)
        table[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = table

    def _rearrange(self, lists: list[Sequence[BlockId]]) -> None:
        """Rows of known lists in their new places; the others empty. Those before the first that is another
        one stay where they are."""
        old, table = self._lists, self._table
        first, most = 0, min(len(lists), len(old))
        while first < most and lists[first] is old[first]:
            first += 1
        places = {id(blocks): row for row, blocks in enumerate(old[first:], first)}
        sources = [places.get(id(blocks), -1) for blocks in lists[first:]]
        if any([source >= 0 for source in sources]):
            table[first : len(lists)] = table[sources]
        for row, source in enumerate(sources, first):
            if source < 0:
                table[row] = 0
        counts = [self._counts[source] if source >= 0 else 0 for source in sources]
        self._counts = self._counts[:first] + counts
        self._lists = lists
