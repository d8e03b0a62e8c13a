"""Paged attention of every backend: right against fp64 softmax, and one set of bits per position."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import PARTITION_SIZE
from tests.kernels.attention_world import World

HEADS = ((9, 3), (4, 4), (8, 1))
HEAD_DIMS = (64, 32, 128, 96, 80, 10)
CONTEXTS = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_close_to_fp64(backend, dtype, heads, head_dim, block_size):
    lengths = [1, 17, 130, 257]
    world = World(lengths, heads, head_dim, block_size, dtype)
    outputs = world.attend(backend, [(index, 0, length) for index, length in enumerate(lengths)])
    for index, out in enumerate(outputs):
        exact = world.exact(index)
        if dtype is torch.float32:
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        else:
            assert ((out.double() - exact).abs() <= world.largest_error(index)).all()


@pytest.mark.parametrize("head_dim", [64, 96, 80])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_steps_chunks_and_whole_prompts_give_the_same_bits(backend, dtype, heads, head_dim):
    length = 2 * PARTITION_SIZE + 10
    world = World([length], heads, head_dim, dtype=dtype)
    [whole] = world.attend(backend, [(0, 0, length)])
    for chunk in (16, 37, PARTITION_SIZE, 200):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            [part] = world.attend(backend, [(0, start, stop)])
            assert torch.equal(part, whole[start:stop])
    for position in (0, 1, 15, 16, 126, 127, 128, 129, 200, 255, 256, 257, length - 1):
        [step] = world.attend(backend, [(0, position, position + 1)])
        assert torch.equal(step[0], whole[position])


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 33])
def test_bits_do_not_depend_on_the_batch(backend, dtype, num_seqs):
    lengths = [CONTEXTS[index % len(CONTEXTS)] for index in range(num_seqs)]
    world = World(lengths, dtype=dtype)
    # decode rows, short chunks and whole prompts side by side, in an order unlike the pool's
    spans = []
    for index, length in enumerate(lengths):
        num_queries = (1, min(length, 21), length)[index % 3]
        spans.append((index, length - num_queries, length))
    spans = spans[::2] + spans[1::2][::-1]
    for span, out in zip(spans, world.attend(backend, spans), strict=True):
        assert torch.equal(out, world.attend(backend, [span])[0])


def test_bits_do_not_depend_on_threads(make_backend, dtype):
    lengths = [300, 1, 129, 64]
    world = World(lengths, dtype=dtype)
    spans = [(0, 0, 300), (1, 0, 1), (2, 128, 129), (3, 30, 64)]
    results = [torch.cat(world.attend(make_backend(num_threads), spans)) for num_threads in (1, 2, 3)]
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("length", CONTEXTS)
def test_bits_do_not_depend_on_blocks_or_block_size(backend, dtype, length):
    results = [
        world.attend(backend, [(0, 0, length)])[0]
        for world in (
            World([length], dtype=dtype, placement=1),
            World([length], dtype=dtype, placement=2),
            World([length], dtype=dtype, block_size=32),
            World([length], dtype=dtype, block_size=128),
        )
    ]
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_a_sequence_without_queries_is_skipped(backend, dtype):
    world = World([20, 30], dtype=dtype)
    outputs = world.attend(backend, [(0, 20, 20), (1, 25, 30)])
    assert outputs[0].shape[0] == 0
    assert torch.equal(outputs[1], world.attend(backend, [(1, 25, 30)])[0])


def test_large_scores_do_not_overflow(backend, dtype):
    world = World([200], dtype=dtype)
    world.scale *= 500.0
    [out] = world.attend(backend, [(0, 0, 200)])
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), world.exact(0), rtol=0.02, atol=0.02)
