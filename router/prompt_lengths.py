"""How long prompts are: a sample of the recent ones, for what a worker's seconds are worth as prefill.

A worker that would be late with half of the prompts even if it were idle is a prefill worker for the other
half alone, so decode takes less from it. `Fleet.expect` keeps that share, per worker.

Pure, without a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.float64]
_Column = NDArray[np.float64]

MEMORY = 512  # prompts
SAMPLE = 20  # quantiles
LEAST_SHARE = 0.02
HASTE_FROM = 0.2  # share of prompts that decode makes late from which on rows gather on fewer workers ...
NEARLY = 0.97  # ... if these are, by this share of the highest worth, those that first tokens need
FIRST, EVERY = 16, 128  # prompts until there is a sample, and from one to the next


class PromptLengths:
    """Owns the lengths of the latest prompts."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._num = 0

    def add(self, num_tokens: int) -> Lengths | None:
        """Another prompt. A sample, each of its lengths as likely, when it is time for a new one."""
        if len(self._lengths) < MEMORY:
            self._lengths.append(num_tokens)
        else:
            self._lengths[self._num % MEMORY] = num_tokens
        self._num += 1
        if self._num != FIRST and self._num % EVERY:
            return None
        middles = (np.arange(SAMPLE) + 0.5) / SAMPLE
        return np.quantile(np.array(self._lengths, dtype=np.float64), middles)


def shares_in_time(
    models: Sequence[_Column], lengths: Lengths, within_s: float, step_s: float
) -> tuple[_Column, _Column]:
    """Of prompts as long as these, those that a worker would have computed in about `within_s`: all of one
    that takes two thirds of it, none of one that takes four thirds, so that workers that are nearly equal
    have nearly equal shares. Never 0: among workers that all would be late, costs are compared as ever.

    The share of an idle worker, and of one whose steps of `step_s` are half full of decode.

    `models`: `fixed_s`, `floor_s`, `per_token_s` and `per_attention_s`, a column each.
    """
    fixed_s, floor_s, per_token_s, per_attention_s = (column[:, None] for column in models)
    own_s = lengths * (per_token_s + per_attention_s * (lengths + 1) / 2)
    idle, busy = (
        np.maximum(np.clip(2 - 1.5 * first_s / within_s, 0.0, 1.0).mean(axis=1), LEAST_SHARE)
        for first_s in (fixed_s + np.maximum(own_s, floor_s), step_s / 2 + 2 * own_s)
    )
    return idle, busy
