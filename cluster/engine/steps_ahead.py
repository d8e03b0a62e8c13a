"""Where rows that go on by a token each will be in the next steps, found for several steps at once.

Between two forward passes everything is cold: the way into numpy then costs ten times what it does there. So
the numbers of the steps to come are laid out ahead, and a step only copies its own into the batch, in one go,
by the ways into memory that touch least: bytes, and an array of ctypes, which the backends call by anyway.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.engine.batch_arrays import BatchArrays, parts_of

MOST_AHEAD = 16  # steps that are laid out at once


class StepsAhead:
    """Of one batch, a token per row: its arrays are what `next` moves on."""

    def __init__(self, arrays: BatchArrays) -> None:
        self._arrays = arrays
        tokens = c_int64 * len(arrays.tokens)
        self._tokens: Any = tokens.from_buffer(arrays.tokens)  # type: ignore[arg-type]
        self._places = memoryview(arrays.places)  # type: ignore[arg-type]
        self._steps: list[bytes] = []  # what is to be in `places`, the next step last

    def next(self, token_ids: list[int], most: int, table: NDArray[np.int32], block_size: int) -> None:
        """The batch is the next one, in which row i brings `token_ids[i]`. If it is not laid out yet, up to
        `most` steps are, in which rows stay in the blocks that `table` has."""
        if not self._steps:
            self._lay_out(min(most, MOST_AHEAD), table, block_size)
        self._tokens[:] = token_ids
        self._places[:] = self._steps.pop()

    def _lay_out(self, num_steps: int, table: NDArray[np.int32], block_size: int) -> None:
        """From where the batch is now."""
        now, num_rows = self._arrays, len(self._arrays.tokens)
        ahead = np.arange(1, num_steps + 1)[:, None]
        size = len(now.places)
        steps = np.empty((num_steps, size + -size % 8), np.uint8)[:, :size]  # each begins where an int64 may
        positions, slots, next_positions, context_lens = parts_of(steps, num_rows, num_rows)
        np.add(now.positions, ahead, out=positions)
        np.add(positions, 1, out=next_positions)
        context_lens[:] = next_positions
        blocks, within = np.divmod(positions, block_size)
        np.multiply(table[np.arange(num_rows), blocks], block_size, out=slots, dtype=np.int64)
        slots += within
        self._steps = [step.tobytes() for step in steps[::-1]]
