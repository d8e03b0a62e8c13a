"""Where rows that go on by a token each will be in the next steps, found for several steps at once.

Between two forward passes everything is cold: the way into numpy then costs ten times what it does there. So
the numbers of the steps to come are laid out ahead, and a step only copies its own into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray


class StepsAhead:
    """Of one batch: its arrays, an element per row, are what `next` moves on."""

    def __init__(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        context_lens: NDArray[np.int32],
    ) -> None:
        self._positions, self._context_lens = positions, context_lens
        self._rows = np.arange(len(tokens))
        self._memory = _memory(positions), _memory(slots), _memory(context_lens)
        self._tokens = _memory(tokens)
        self._write = Struct(f"{len(tokens)}q").pack_into
        self._steps: list[tuple[memoryview, memoryview, memoryview]] = []  # as `_memory`, the next one last

    def __len__(self) -> int:
        """Steps that are laid out."""
        return len(self._steps)

    def lay_out(self, num_steps: int, table: NDArray[np.int32], block_size: int) -> None:
        """From where the batch is now; in these steps rows stay in the blocks that `table` has."""
        ahead = np.arange(1, num_steps + 1)[:, None]
        positions = self._positions + ahead
        blocks, slots = np.divmod(positions, block_size)
        slots += table[self._rows, blocks].astype(np.int64) * block_size
        context_lens = (self._context_lens + ahead).astype(np.int32)
        steps = zip(map(_memory, positions), map(_memory, slots), map(_memory, context_lens), strict=True)
        self._steps = list(steps)[::-1]

    def next(self, token_ids: Sequence[int]) -> None:
        """The batch is the next one, in which row i brings `token_ids[i]`."""
        self._write(self._tokens, 0, *token_ids)
        positions, slots, context_lens = self._memory
        positions[:], slots[:], context_lens[:] = self._steps.pop()


def _memory(array: NDArray[Any]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]
