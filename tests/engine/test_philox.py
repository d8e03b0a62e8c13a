import numpy as np
import pytest

from cluster.engine.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_is_made_of_the_first_two_words():
    w0, w1, _, _ = philox4x32((7, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(0x0123456789ABCDEF, 7) == ((w0 >> 5) * 2**26 + (w1 >> 6)) / 2**53


def test_seed_is_taken_modulo_2_to_the_64():
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(2**64 + 5, 3) == uniform(5, 3)
    assert uniform(1 << 40, 3) != uniform(0, 3)  # the high word of the seed counts
    assert uniform(0, 1 << 33) != uniform(0, 0)  # and the high word of the position


def test_uniformity_over_positions_and_over_seeds():
    for numbers in ([uniform(42, i) for i in range(20_000)], [uniform(i, 42) for i in range(20_000)]):
        assert 0.0 <= min(numbers) <= max(numbers) < 1.0
        observed = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi_square = ((observed - 200.0) ** 2 / 200.0).sum()
        assert 60 < chi_square < 150  # 99 degrees of freedom: outside with p < 0.001
