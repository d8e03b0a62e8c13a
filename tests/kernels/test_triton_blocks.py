"""KV blocks to a staging buffer and back: every element once, in any layout and dtype."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, random, require

blocks = require("kernels.triton.blocks")
POOL, HEADS_FIRST = blocks.StagingLayout.POOL, blocks.StagingLayout.HEADS_FIRST
LAYERS, HEADS = range(1, 3), range(1, 3)
PARTS = [(range(3), range(3)), (LAYERS, HEADS), (range(2, 3), range(1))]


def make_pool(dtype=torch.float32, seed=0):
    """[5 blocks, 3 layers, 2, 4 slots, 3 heads, 20 elements]"""
    values = random(5, 3, 2, 4, 3, 20, seed=seed)
    return (values * 50).to(dtype) if dtype is torch.int8 else values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("layout", [POOL, HEADS_FIRST])
@pytest.mark.parametrize(("layers", "heads"), PARTS, ids=str)
def test_a_pool_goes_through_staging_unchanged(dtype, layout, layers, heads):
    pool, target = make_pool(dtype), make_pool(dtype, seed=1)
    ids, target_ids = [4, 0, 2], [1, 3, 0]
    staging = blocks.gather_blocks(pool, ids, layers, heads, layout)
    cut = pool[ids, layers.start : layers.stop, :, :, heads.start : heads.stop]
    assert torch.equal(staging, cut if layout is POOL else cut.permute(0, 4, 1, 2, 3, 5))
    expected = target.clone()
    expected[target_ids, layers.start : layers.stop, :, :, heads.start : heads.stop] = cut
    blocks.scatter_blocks(staging, target, target_ids, layers, heads, layout)
    assert torch.equal(target, expected)


def test_dtype_changes_on_the_way_out_and_in():
    pool, target = make_pool(), make_pool(torch.float16, seed=1)
    staging = blocks.gather_blocks(pool, [3, 1], LAYERS, HEADS, HEADS_FIRST, torch.float16)
    assert torch.equal(staging, pool[[3, 1], 1:3, :, :, 1:3].permute(0, 4, 1, 2, 3, 5).half())
    wide = blocks.gather_blocks(target, [2], LAYERS, HEADS, POOL, torch.float32)
    assert torch.equal(wide, target[[2], 1:3, :, :, 1:3].float())
    blocks.scatter_blocks(wide, target, [0], LAYERS, HEADS)
    assert torch.equal(target[0, 1:3, :, :, 1:3], target[2, 1:3, :, :, 1:3])


def test_what_cannot_be_moved_is_refused_before_anything_is_written():
    pool = make_pool()
    before = pool.clone()
    staging = blocks.gather_blocks(pool, [0, 1], LAYERS, HEADS)
    with pytest.raises(IndexError, match="no such KV block: 5, there are 5"):
        blocks.scatter_blocks(staging + 1, pool, [0, 5], LAYERS, HEADS)
    with pytest.raises(IndexError, match="heads"):
        blocks.gather_blocks(pool, [0], LAYERS, range(2, 4))
    with pytest.raises(ValueError, match="named twice"):
        blocks.scatter_blocks(staging, pool, [1, 1], LAYERS, HEADS)
    with pytest.raises(ValueError, match="`staging` must be contiguous"):
        blocks.scatter_blocks(staging, pool, [0, 1], LAYERS, range(3))
    with pytest.raises(TypeError, match="cannot be moved as"):
        blocks.gather_blocks(make_pool(torch.int8), [0], LAYERS, HEADS, dtype=torch.float32)
    assert torch.equal(pool, before)
    assert blocks.gather_blocks(pool, [], LAYERS, HEADS).shape[0] == 0


def test_int8_rows_take_their_scales_along():
    from kernels.reference import dequantize_kv, quantize_kv

    values = random(2, 1, 2, 4, 1, 16)
    pool = quantize_kv(values).to(DEVICE)
    staging = blocks.gather_blocks(pool, [1, 0], range(1), range(1))
    assert torch.equal(dequantize_kv(staging), dequantize_kv(pool[[1, 0]]))
