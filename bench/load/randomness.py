"""Where a plan's chance comes from: one generator per purpose, all from one seed.

Lengths, arrivals and tokens draw from streams of their own, so that a change of one setting (another rate,
say) does not move what the others draw.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def derive(seed: int, *labels: str | int) -> int:
    """A 64-bit number, a function of `seed` and `labels` alone."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The generator of `purpose`: PCG64, seeded by `derive(seed, purpose)`."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose)))
