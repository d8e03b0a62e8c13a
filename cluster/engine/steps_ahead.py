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
    """Of one batch, a token per row. A step moves it on by two assignments, to `tokens` and to `places`."""

    __slots__ = ("_num_rows", "places", "steps", "tokens")

    def __init__(self, arrays: BatchArrays) -> None:
        self._num_rows = arrays.sizes[0]
        self.tokens: Any = (c_int64 * self._num_rows).from_buffer(arrays.tokens)  # [:], what each row brings
        self.places = arrays.places  # [:], the last of ...
        self.steps: list[bytes] = []  # ... these, which is then no more; the next step last

    def lay_out(self, most: int, table: NDArray[np.int32], block_size: int) -> None:
        """The next steps from where the batch is now: up to `most`, in which rows stay in the blocks that
        `table` has."""
        num_steps, num_rows, size = min(most, MOST_AHEAD), self._num_rows, len(self.places)
        now, *_ = parts_of(np.frombuffer(self.places, np.uint8), num_rows)
        ahead = np.arange(1, num_steps + 1)[:, None]
        steps = np.empty((num_steps, size + -size % 8), np.uint8)[:, :size]  # each begins where an int64 may
        positions, slots, next_positions, context_lens = parts_of(steps, num_rows)
        np.add(now, ahead, out=positions)
        np.add(positions, 1, out=next_positions)
        context_lens[:] = next_positions
        blocks, within = np.divmod(positions, block_size)
        np.multiply(table[np.arange(num_rows), blocks], block_size, out=slots, dtype=np.int64)
        slots += within
        self.steps = [step.tobytes() for step in steps[::-1]]
