"""Triton's paged attention: right against fp64, one set of bits per position, however a row is computed."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import PARTITION_SIZE
from tests.kernels.attention_world import World
from tests.kernels.triton_support import DEVICE, DTYPES, TOLERANCES, require

attention = require("kernels.triton.attention")
tiles = require("kernels.triton.tiles")
LENGTH = PARTITION_SIZE + 12

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU `bench.gpu_check` compares at real sizes"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


class Kernels:
    """As a backend, with the number of splits at hand."""

    def __init__(self, mode="exact", num_splits=None):
        self.mode, self.num_splits = tiles.Mode(mode), num_splits

    def paged_attention(self, q, pool, layer, meta, scale):
        return attention.paged_attention(
            q, pool, layer, meta, scale, tiles.INTERPRETER, self.mode, self.num_splits
        )


EXACT = Kernels()
SHAPES = [
    ((3, 1), 24, 16),
    ((4, 4), 16, 32),
    ((8, 1), 40, 128),
    ((7, 1), 8, 16),
]  # heads, head_dim, block size


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES, ids=str)
def test_attention_is_close_to_fp64(dtype, heads, head_dim, block_size, mode):
    lengths = [1, 17, PARTITION_SIZE + 3]
    world = World(lengths, heads, head_dim, block_size, dtype)
    tolerance = TOLERANCES[dtype]
    # short prompts, and the tails of all: a chunk and decode rows
    spans = [(0, 0, 1), (1, 0, 17), (2, PARTITION_SIZE - 4, PARTITION_SIZE + 3)]
    spans += [(index, length - 1, length) for index, length in enumerate(lengths)]
    for (index, start, stop), out in zip(spans, world.attend(Kernels(mode), spans), strict=True):
        expected = world.exact(index)[start:stop]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def worlds():
    """dtype → a sequence of group 3, and its whole prompt's output."""
    made = {}
    for dtype in DTYPES:
        world = World([LENGTH, 20], (3, 1), 24, dtype=dtype)
        made[dtype] = (world, world.attend(EXACT, [(0, 0, LENGTH)])[0])
    return made


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3])
def test_decode_rows_have_the_prompts_bits_in_any_number_of_splits(dtype, num_splits, worlds):
    world, whole = worlds[dtype]
    for position in (0, PARTITION_SIZE - 1, PARTITION_SIZE, LENGTH - 1):
        [step] = world.attend(Kernels(num_splits=num_splits), [(0, position, position + 1)])
        assert torch.equal(step[0], whole[position])


@pytest.mark.parametrize("chunk", [37, PARTITION_SIZE])
def test_chunks_have_the_prompts_bits(dtype, chunk, worlds):
    world, whole = worlds[dtype]
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        [part] = world.attend(EXACT, [(0, start, stop)])
        assert torch.equal(part, whole[start:stop])


def test_bits_do_not_depend_on_the_batch(dtype, worlds):
    """A decode row, a chunk and a short prompt side by side, in both orders."""
    world, whole = worlds[dtype]
    spans = [(0, LENGTH - 1, LENGTH), (1, 3, 20), (0, LENGTH - 9, LENGTH), (1, 19, 20)]
    alone = [world.attend(EXACT, [span])[0] for span in spans]
    assert torch.equal(alone[2], whole[LENGTH - 9 :])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        together = world.attend(EXACT, [spans[index] for index in order])
        assert all(torch.equal(out, alone[index]) for out, index in zip(together, order, strict=True))


def test_bits_do_not_depend_on_blocks_or_block_size(dtype, worlds):
    _, whole = worlds[dtype]
    for where in ({"placement": 2}, {"block_size": 128}):
        world = World([LENGTH, 20], (3, 1), 24, dtype=dtype, **where)
        [tail] = world.attend(EXACT, [(0, LENGTH - 6, LENGTH)])
        assert torch.equal(tail, whole[LENGTH - 6 :])


def test_sequences_without_queries_are_skipped(dtype, worlds):
    """Also where there are as many tokens as sequences, of which some have two and some none."""
    world, whole = worlds[dtype]
    outputs = world.attend(EXACT, [(1, 20, 20), (0, LENGTH - 2, LENGTH), (1, 20, 20), (1, 19, 20)])
    assert [len(out) for out in outputs] == [0, 2, 0, 1]
    assert torch.equal(outputs[1], whole[-2:])
    assert torch.equal(outputs[3], world.attend(EXACT, [(1, 19, 20)])[0])
    outputs = world.attend(EXACT, [(1, 20, 20), (0, LENGTH - 2, LENGTH)])
    assert torch.equal(outputs[1], whole[-2:])


def test_large_scores_do_not_overflow(dtype):
    world = World([30], (3, 1), 24, dtype=dtype)
    world.scale *= 500.0
    [out] = world.attend(EXACT, [(0, 0, 30)])
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), world.exact(0), rtol=0.02, atol=0.02)
