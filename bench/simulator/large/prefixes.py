"""Which cells have been sent which blocks of prompts: what the choice of a cell knows of prefix caches.

A router of cells sees no worker's cache; it remembers where it has sent what. So a block may be gone by the
time it is looked for: then the request is computed as any other, in a cell that was as good as others. The
blocks placed latest are remembered, `most` of them, each with all cells that have had it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_BLOCKS = 1_000_000


class SentPrefixes:
    """Owns what was sent. A block names the prompt up to it: whoever has had it has had those before."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._cells: OrderedDict[int, int] = OrderedDict()  # block |-> cells as bits

    def __len__(self) -> int:
        return len(self._cells)

    def longest(self, blocks: Sequence[int]) -> tuple[int, int]:
        """(how many leading blocks some cell has had, those cells as bits)."""
        known = self._cells
        for count in range(len(blocks), 0, -1):
            if (cells := known.get(blocks[count - 1])) is not None:
                return count, cells
        return 0, 0

    def of(self, blocks: Sequence[int], cell: int) -> int:
        """How many leading blocks this cell has had."""
        bit, known = 1 << cell, self._cells
        for count in range(len(blocks), 0, -1):
            if known.get(blocks[count - 1], 0) & bit:
                return count
        return 0

    def sent(self, blocks: Sequence[int], cell: int) -> None:
        bit, known = 1 << cell, self._cells
        for block in reversed(blocks):  # the first is the most shared: it goes last
            known[block] = known.get(block, 0) | bit
            known.move_to_end(block)
        while len(known) > self._most:
            known.popitem(last=False)
