"""The memory of packed batches of one size: one piece, written in two goes, with a place for each tensor.

What changes in every step of a run lies together in it (`places`), so that a step can move on in one copy.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sizes = tuple[int, int, int]  # rows, tokens, samples


class BatchArrays:
    """As `cluster.engine.packed_batch.PackedBatch` has them, on the host."""

    __slots__ = ("_counts", "_memory", "_words", "next_positions", "places", "sizes", "tokens")

    def __init__(self, sizes: Sizes) -> None:
        num_rows, num_tokens, num_samples = sizes
        self.sizes: Final = sizes
        num_words = 3 * num_tokens + 2 * num_samples  # int64, then int32
        self._memory = bytearray(8 * num_words + 4 * (2 * num_rows + 1))
        memory = memoryview(self._memory)
        self._words = memory[: 8 * num_words].cast("q")
        self._counts = memory[8 * num_words :].cast("i")
        self.tokens = memory[: 8 * num_tokens]
        # of all tokens the positions and slots, of those to choose the positions, and context lengths
        first = 8 * (num_tokens + num_samples)
        self.places = memory[first : 8 * num_words + 4 * num_rows]
        self.next_positions = np.frombuffer(self.places[16 * num_tokens :], np.int64, num_samples)

    def write(
        self,
        tokens: list[int],
        logit_rows: list[int],
        positions: list[int],
        slots: list[int],
        next_positions: list[int],
        context_lens: list[int],
        query_starts: list[int],
    ) -> None:
        self._words[:] = array("q", tokens + logit_rows + positions + slots + next_positions)
        self._counts[:] = array("i", context_lens + query_starts)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of this memory, in the order of `write`, `next_positions` left out."""
        num_rows, num_tokens, num_samples = self.sizes
        at = 0

        def next_of(dtype: torch.dtype, count: int) -> Tensor:
            nonlocal at
            if not count:  # which `frombuffer` refuses
                return torch.empty(0, dtype=dtype)
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at)
            at += count * dtype.itemsize
            return tensor

        words = [next_of(torch.int64, count) for count in (num_tokens, num_samples, num_tokens, num_tokens)]
        at += 8 * num_samples  # `next_positions`
        tokens, logit_rows, positions, slots = words
        context_lens, query_starts = next_of(torch.int32, num_rows), next_of(torch.int32, num_rows + 1)
        return tokens, logit_rows, positions, slots, context_lens, query_starts


def parts_of(
    places: NDArray[np.uint8], num_tokens: int, num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """What is in each line of `places`, of rows that all sample."""
    slots, rows = 8 * num_tokens, 16 * num_tokens
    context_lens = rows + 8 * num_rows
    return (
        places[..., :slots].view(np.int64),
        places[..., slots:rows].view(np.int64),
        places[..., rows:context_lens].view(np.int64),
        places[..., context_lens:].view(np.int32),
    )
