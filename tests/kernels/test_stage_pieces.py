"""Pieces of a stage are as even as they can be without getting long, and whoever takes one knows the next."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.compiled_source import compiled


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("stage_pieces.cpp")
    library = compiled(source, tmp_path_factory.mktemp("stage"))
    library.stage_even_piece.restype = library.stage_taken.restype = ctypes.c_int64
    return library


def even_piece(library: ctypes.CDLL, length: int, shortest: int, num_threads: int) -> int:
    return int(library.stage_even_piece(*map(ctypes.c_int64, (length, shortest, num_threads))))


def longest_share(length: int, piece: int, num_threads: int) -> int:
    """Of threads that take pieces in turn."""
    lengths = [min(piece, length - start) for start in range(0, length, piece)]
    return max(sum(lengths[thread::num_threads]) for thread in range(num_threads))


@pytest.mark.parametrize(
    ("length", "shortest", "num_threads", "expected"),
    [
        (18, 2, 2, 3),
        (30, 2, 2, 3),
        (48, 3, 2, 3),
        (1536, 96, 2, 96),
        (9, 2, 1, 3),
        (5, 5, 2, 5),
        (7, 1, 3, 1),
    ],
)
def test_pieces_by_which_threads_end_together(library, length, shortest, num_threads, expected):
    assert even_piece(library, length, shortest, num_threads) == expected


def test_no_piece_is_long_or_less_even_than_the_shortest(library):
    for num_threads in (1, 2, 3, 8):
        for length in range(1, 100):
            for shortest in range(1, length + 1):
                piece = even_piece(library, length, shortest, num_threads)
                assert shortest <= piece <= 2 * shortest
                most = -(-length // shortest)
                at_best = -(-most // num_threads) * shortest  # of whole pieces
                assert longest_share(length, piece, num_threads) <= at_best


@pytest.mark.parametrize("helped", [0, 1, 3, 4, 7])
def test_who_takes_a_piece_knows_where_its_next_one_begins(library, helped):
    taken = (ctypes.c_int64 * 60)()
    count = library.stage_taken(*map(ctypes.c_int64, (20, 3, helped)), taken)
    pieces = [tuple(taken[3 * i : 3 * i + 3]) for i in range(count)]
    assert sorted(begin for begin, _, _ in pieces) == list(range(0, 20, 3))
    assert all(end == min(begin + 3, 20) for begin, end, _ in pieces)
    assert pieces[-1][2] == -1
    back, front = pieces[:helped], pieces[helped:]
    for by_one in (back, front):
        for (_, _, next_one), (begin, _, _) in pairwise(by_one):
            assert next_one == begin
