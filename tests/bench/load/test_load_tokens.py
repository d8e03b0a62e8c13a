import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.tokens import Part, Segment, TokenStream, num_tokens, resize

SEGMENTS = st.lists(
    st.builds(Segment, st.sampled_from(Part), st.integers(-(2**70), 2**70), st.integers(0, 40)),
    min_size=1,
    max_size=5,
)


@given(SEGMENTS, st.integers(1, 2**32), st.integers(-(2**80), 2**80), st.integers(0, 9))
def test_numbers_are_a_function_of_segment_and_position(
    segments: list[Segment], limit: int, seed: int, salt: int
) -> None:
    whole = TokenStream(seed, salt).numbers(segments, limit).tolist()
    each = [TokenStream(seed, salt).numbers([segment], limit).tolist() for segment in segments]
    assert whole == [number for numbers in each for number in numbers]
    assert all(0 <= number < limit for number in whole)


@given(SEGMENTS, st.integers(0, 250))
def test_resized_segments_begin_alike(segments: list[Segment], num: int) -> None:
    stream = TokenStream(1, 2)
    resized = resize(segments, num)
    assert num_tokens(resized) == num
    shared = min(num, num_tokens(segments))
    assert stream.numbers(resized, 1000).tolist()[:shared] == stream.numbers(segments, 1000).tolist()[:shared]


def test_seed_salt_part_and_number_all_matter() -> None:
    segment = Segment(Part.REQUEST, 5, 50)
    drawn = [
        TokenStream(1, 0).numbers([segment], 1000),
        TokenStream(2, 0).numbers([segment], 1000),
        TokenStream(1, 1).numbers([segment], 1000),
        TokenStream(1, 0).numbers([Segment(Part.REQUEST, 6, 50)], 1000),
        TokenStream(1, 0).numbers([Segment(Part.BLOCK, 5, 50)], 1000),
    ]
    for first in range(len(drawn)):
        for second in range(first):
            assert (drawn[first] == drawn[second]).sum() < 5


def test_numbers_are_evenly_spread() -> None:
    """Chi-square over 100 bins, within a request's tokens and over the first tokens of many requests."""
    stream = TokenStream(0, 0)
    long = stream.numbers([Segment(Part.REQUEST, 3, 100_000)], 100)
    first = np.concatenate([stream.numbers([Segment(Part.REQUEST, i, 1)], 100) for i in range(5000)])
    for numbers in (long, first):
        expected = len(numbers) / 100
        chi_square = (((np.bincount(numbers, minlength=100) - expected) ** 2) / expected).sum()
        assert chi_square == pytest.approx(99, abs=4 * np.sqrt(2 * 99))
