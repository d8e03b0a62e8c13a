"""The memory of packed batches of one size: one piece, written in two goes, with a place for each tensor.

What changes in every step of a run lies together in it (`places`), so that a step can move on in one copy.
Each tensor begins at a multiple of 16 bytes, as if it had memory of its own: kernels are compiled for that.
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
        num_words = 3 * _even(num_tokens) + 2 * _even(num_samples)  # int64, then int32
        self._memory = bytearray(8 * num_words + 4 * (2 * num_rows + 1 + -num_rows % 4))
        memory = memoryview(self._memory)
        self._words = memory[: 8 * num_words].cast("q")
        self._counts = memory[8 * num_words :].cast("i")
        self.tokens = memory[: 8 * num_tokens]
        # of all tokens the positions and slots, of those to choose the positions, and context lengths
        first = 8 * (_even(num_tokens) + _even(num_samples))
        self.places = memory[first : 8 * num_words + 4 * num_rows]
        self.next_positions = np.frombuffer(self.places[16 * _even(num_tokens) :], np.int64, num_samples)

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
        num_rows, num_tokens, num_samples = self.sizes
        if num_tokens % 2:
            tokens, positions, slots = [*tokens, 0], [*positions, 0], [*slots, 0]
        if num_samples % 2:
            logit_rows, next_positions = [*logit_rows, 0], [*next_positions, 0]
        self._words[:] = array("q", tokens + logit_rows + positions + slots + next_positions)
        self._counts[:] = array("i", context_lens + [0] * (-num_rows % 4) + query_starts)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of this memory, in the order of `write`, `next_positions` left out."""
        num_rows, num_tokens, num_samples = self.sizes
        at = 0

        def next_of(dtype: torch.dtype, count: int) -> Tensor:
            nonlocal at
            if not count:  # which `frombuffer` refuses
                return torch.empty(0, dtype=dtype)
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at)
            at += -(-count * dtype.itemsize // 16) * 16
            return tensor

        words = [next_of(torch.int64, count) for count in (num_tokens, num_samples, num_tokens, num_tokens)]
        at += 8 * _even(num_samples)  # `next_positions`
        tokens, logit_rows, positions, slots = words
        context_lens, query_starts = next_of(torch.int32, num_rows), next_of(torch.int32, num_rows + 1)
        return tokens, logit_rows, positions, slots, context_lens, query_starts


def parts_of(
    places: NDArray[np.uint8], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """What is in each line of `places`, of rows that bring a token and sample."""
    size, step = 8 * num_rows, 8 * _even(num_rows)
    return (
        places[..., :size].view(np.int64),
        places[..., step : step + size].view(np.int64),
        places[..., 2 * step : 2 * step + size].view(np.int64),
        places[..., 3 * step :].view(np.int32),
    )


def _even(count: int) -> int:
    return count + count % 2
