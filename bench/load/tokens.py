"""The tokens of a plan: a function of (seed, salt, which part, position), drawn for a whole prompt at once.

1. A workload describes a prompt as `Segment`s: "the first 512 tokens of prefix 3, then 100 of request 17".
2. `TokenStream.numbers` hashes part and position to evenly spread numbers below a limit (splitmix64's
   finalizer, its increment as step). Equal segments give equal tokens, and a shorter segment is the
   beginning of a longer one.
3. The writers of `prompts` turn the numbers into token ids or into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from bench.load.randomness import derive

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1


class Part(Enum):
    """What a segment belongs to; segments of different parts have nothing in common."""

    REQUEST = "request"  # number: the arrival, or the message of a chat
    PREFIX = "prefix"  # number: the group
    BLOCK = "block"  # number: the hash id of a trace
    SESSION = "session"  # number: the session of a trace
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Segment:
    part: Part
    number: int
    num_tokens: int


def num_tokens(segments: Sequence[Segment]) -> int:
    return sum(segment.num_tokens for segment in segments)


def resize(segments: Sequence[Segment], num: int) -> tuple[Segment, ...]:
    """The first `num` tokens of `segments`; if they are fewer, the last segment grows."""
    kept: list[Segment] = []
    left = num
    for position, segment in enumerate(segments):
        is_last = position == len(segments) - 1
        taken = left if is_last else min(segment.num_tokens, left)
        if taken > 0:
            kept.append(segment if taken == segment.num_tokens else replace(segment, num_tokens=taken))
        left -= taken
    return tuple(kept)


class TokenStream:
    """Owns the keys of one (seed, salt)."""

    def __init__(self, seed: int, salt: int) -> None:
        self._bases = {part: derive(seed, "tokens", salt, part.value) for part in Part}

    def numbers(self, segments: Sequence[Segment], limit: int) -> NDArray[np.int64]:
        """One number in [0, `limit`) per token; `limit` ≤ 2³²."""
        int_step = int(_STEP)
        counts = np.array([segment.num_tokens for segment in segments], dtype=np.int64)
        keys = np.array(
            [(self._bases[segment.part] + segment.number * int_step) & _MASK for segment in segments],
            dtype=np.uint64,
        )
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)
        values = _mix(np.repeat(_mix(keys), counts) + positions.astype(np.uint64) * _STEP)
        values >>= np.uint64(32)
        values *= np.uint64(limit)
        values >>= np.uint64(32)
        return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values ^ (values >> np.uint64(30))
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values
