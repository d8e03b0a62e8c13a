"""Gather of KV blocks into a staging buffer, and scatter back, with layout and dtype changed on the way."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_blocks", "num_rows", "first_layer", "first_head", "num_layers", "num_heads"]
)
def move_blocks_kernel(
    pool, staging, block_ids, num_blocks, num_rows, first_layer, first_head, num_layers, num_heads,
    block_size,
    row_size, stride_block, stride_layer, stride_kv, stride_slot,
    GATHER: tl.constexpr, HEADS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, ceil(num_rows / ROWS)). Rows of a block are numbered in the staging order:
    [num_layers, 2, block_size, num_heads], or with HEADS_FIRST [num_heads, num_layers, 2, block_size];
    num_rows = their product. A row is `row_size` elements, contiguous on both sides.
    GATHER: staging[i] = pool[block_ids[i]]; else pool[block_ids[i]] = staging[i]."""
    block = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < row_size)[None, :]
    if HEADS_FIRST:
        slot, rest = rows % block_size, rows // block_size
        which, rest = rest % 2, rest // 2
        layer, head = rest % num_layers, rest // num_layers
    else:
        head, rest = rows % num_heads, rows // num_heads
        slot, rest = rest % block_size, rest // block_size
        which, layer = rest % 2, rest // 2
    block_id = tl.load(block_ids + block).to(tl.int64)
    in_block = (first_layer + layer) * stride_layer + which * stride_kv + slot * stride_slot
    pool_rows = pool + block_id * stride_block + in_block + (first_head + head) * row_size
    staging_rows = staging + block * num_rows * row_size + rows.to(tl.int64) * row_size
    in_pool = pool_rows[:, None] + columns[None, :]
    in_staging = staging_rows[:, None] + columns[None, :]
    if GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=inside).to(staging.dtype.element_ty), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=inside).to(pool.dtype.element_ty), mask=inside)
