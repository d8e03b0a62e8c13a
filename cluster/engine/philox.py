"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).

A number is a function of (seed, position) and of nothing else, so every worker draws the same one for the
same token of a request: no generator state is kept, moved or lost.
"""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key, least significant word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. key = seed modulo 2^64, counter = position."""
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    w0, w1, _, _ = philox4x32((position & _MASK32, (position >> 32) & _MASK32, 0, 0), key)
    return ((w0 >> 5) * 67108864 + (w1 >> 6)) * 2.0**-53
