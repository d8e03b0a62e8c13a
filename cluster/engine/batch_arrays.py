"""The memory of a packed batch, as large as that is: what changes in every step of a run is one piece."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[int, int, int]  # rows, tokens, samples


class BatchArrays:
    """As `cluster.engine.packed_batch.PackedBatch` has them, on the host."""

    __slots__ = (
        "context_lens",
        "logit_rows",
        "next_positions",
        "places",
        "positions",
        "query_starts",
        "sizes",
        "slots",
        "tokens",
    )

    def __init__(self, sizes: Sizes) -> None:
        num_rows, num_tokens, num_samples = sizes
        self.sizes: Final = sizes
        self.tokens = np.empty(num_tokens, np.int64)
        self.query_starts = np.zeros(num_rows + 1, np.int32)
        self.logit_rows = np.empty(num_samples, np.int64)
        # of all tokens the positions and slots, of all rows the positions of the tokens to choose, twice
        self.places = np.empty(16 * num_tokens + 12 * num_rows, np.uint8)
        self.positions, self.slots, self.next_positions, self.context_lens = parts_of(
            self.places, num_tokens, num_rows
        )


def parts_of(
    places: NDArray[np.uint8], num_tokens: int, num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """What is in each line of `places`."""
    slots, rows = 8 * num_tokens, 16 * num_tokens
    context_lens = rows + 8 * num_rows
    return (
        places[..., :slots].view(np.int64),
        places[..., slots:rows].view(np.int64),
        places[..., rows:context_lens].view(np.int64),
        places[..., context_lens:].view(np.int32),
    )
