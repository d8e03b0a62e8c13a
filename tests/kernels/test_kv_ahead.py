"""What products ask for before attention reads it: each line once, however products are cut, and no other."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled_source import compiled

LINE = 64
NUM_LAYERS, BLOCK_SIZE = 3, 16
# multiply-adds before a product, after it, and of all products between two attentions
SHARES = ((0, 20, 100), (20, 70, 100), (70, 100, 100))
NUM_PANELS, TILES = 40, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("kv_ahead_list.cpp")
    library = compiled(source, tmp_path_factory.mktemp("kv_ahead"))
    library.list_asked.restype = library.list_most_bytes.restype = ctypes.c_int64
    return library


def array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)


def asked(
    library: ctypes.CDLL,
    contexts: Sequence[int],
    tables: Sequence[Sequence[int]],
    token_bytes: int,
    layer: int,
    piece_ends: Sequence[int],
) -> Counter[int]:
    """How often each line of the pool is asked for by all products together."""
    flat = array(ctypes.c_int32, [block for table in tables for block in table])
    at, lines = ((ctypes.c_int64 * (NUM_PANELS * TILES))() for _ in range(2))
    count: Counter[int] = Counter()
    for share in SHARES:
        num = library.list_asked(
            array(ctypes.c_int32, contexts),
            flat,
            ctypes.c_int64(len(tables[0])),
            ctypes.c_int64(len(contexts)),
            ctypes.c_int64(BLOCK_SIZE),
            ctypes.c_int64(token_bytes),
            ctypes.c_int64(NUM_LAYERS),
            ctypes.c_int64(layer),
            array(ctypes.c_int64, share),
            ctypes.c_int64(len(piece_ends)),
            array(ctypes.c_int64, piece_ends),
            ctypes.c_int64(TILES),
            ctypes.c_void_p(0x1000000),  # never read
            at,
            lines,
        )
        assert num == NUM_PANELS * TILES
        for first, length in zip(at[:num], lines[:num], strict=True):
            assert first % LINE == 0
            count.update(range(first // LINE, first // LINE + length))
    return count


def read_lines(
    contexts: Sequence[int], tables: Sequence[Sequence[int]], token_bytes: int, layer: int
) -> set[int]:
    """Lines that attention reads of a layer."""
    lines: set[int] = set()
    for context, table in zip(contexts, tables, strict=True):
        for position in range(context):
            for which in range(2):
                half = (table[position // BLOCK_SIZE] * NUM_LAYERS + layer) * 2 + which
                first = (half * BLOCK_SIZE + position % BLOCK_SIZE) * token_bytes
                lines.update(range(first // LINE, (first + token_bytes - 1) // LINE + 1))
    return lines


def some_batch(num_seqs: int, longest: int) -> tuple[list[int], list[list[int]]]:
    draw = random.Random(num_seqs)
    per_seq = -(-longest // BLOCK_SIZE)
    blocks = draw.sample(range(2 * num_seqs * per_seq), num_seqs * per_seq)
    contexts = [draw.randint(longest // 2, longest) for _ in range(num_seqs)]
    return contexts, [blocks[s * per_seq : (s + 1) * per_seq] for s in range(num_seqs)]


@pytest.mark.parametrize("piece_ends", [(NUM_PANELS,), (4, 12, 21, NUM_PANELS)])
@pytest.mark.parametrize("token_bytes", [LINE * 3, 204])
def test_each_line_that_attention_reads_is_asked_for_once(library, piece_ends, token_bytes):
    contexts, tables = some_batch(num_seqs=7, longest=80)
    count = asked(library, contexts, tables, token_bytes, 1, piece_ends)
    assert set(count) == read_lines(contexts, tables, token_bytes, 1)
    if token_bytes % LINE == 0:  # else two tiles may share a line
        assert set(count.values()) == {1}


def test_each_layer_has_its_own_lines(library):
    contexts, tables = some_batch(num_seqs=4, longest=64)
    for layer in range(NUM_LAYERS):
        count = asked(library, contexts, tables, LINE * 3, layer, (NUM_PANELS,))
        assert set(count) == read_lines(contexts, tables, LINE * 3, layer)


def test_no_more_is_asked_for_than_caches_hold(library):
    contexts, tables = some_batch(num_seqs=30, longest=64)
    token_bytes = LINE * 150
    lines = sum(asked(library, contexts, tables, token_bytes, 0, (NUM_PANELS,)).values())
    assert 2 * sum(contexts) * token_bytes > library.list_most_bytes()
    assert lines * LINE <= library.list_most_bytes() + 2 * BLOCK_SIZE * token_bytes


def test_an_empty_batch_asks_for_nothing(library):
    assert not asked(library, [0], [[0]], LINE, 0, (NUM_PANELS,))
