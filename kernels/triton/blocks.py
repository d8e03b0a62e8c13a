"""KV blocks into a buffer for the wire and back: layout and dtype change on the way.

A pool of one layout and dtype may feed a pool of another: a staging buffer is made in the receiver's dtype,
and with heads first where ranks of other tensor-parallel sizes take a range of heads each, so that what a
rank gets lies together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.triton.checks import check_pool, why_not_dtype
from kernels.triton.jit.blocks import move_blocks_kernel
from kernels.triton.launch import cdiv, launch, next_power_of_2

_ELEMENTS = 4096  # about so many per program


class StagingLayout(enum.Enum):
    """Order of a block's rows in a staging buffer; a row is one token's keys or values of one head."""

    POOL = "pool"  # [blocks, layers, 2, block_size, heads, row_size]
    HEADS_FIRST = "heads first"  # [blocks, heads, layers, 2, block_size, row_size]


def staging_shape(
    pool: Tensor, num_blocks: int, layers: range, heads: range, layout: StagingLayout
) -> tuple[int, ...]:
    block_size, row_size = pool.shape[3], pool.shape[5]
    if layout is StagingLayout.POOL:
        return (num_blocks, len(layers), 2, block_size, len(heads), row_size)
    return (num_blocks, len(heads), len(layers), 2, block_size, row_size)


def gather_blocks(
    pool: Tensor, block_ids: Sequence[int], layers: range, heads: range,
    layout: StagingLayout = StagingLayout.POOL, dtype: torch.dtype | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Blocks of `pool`, cut to `layers` and `heads`, as a staging buffer of `dtype` (None: the pool's), or in
    `out`.

    Raises:
        IndexError: a block, layer or head is not in the pool; nothing was copied.
        ValueError: the shape of `out` is not that of these blocks, layers and heads.
        TypeError: the dtypes cannot be converted.
    """
    shape = staging_shape(pool, len(block_ids), layers, heads, layout)
    staging = pool.new_empty(shape, dtype=dtype or pool.dtype) if out is None else out
    _check_staging(staging, shape)
    _move(pool, staging, block_ids, layers, heads, layout, gather=True)
    return staging


def scatter_blocks(
    staging: Tensor, pool: Tensor, block_ids: Sequence[int], layers: range, heads: range,
    layout: StagingLayout = StagingLayout.POOL,
) -> None:  # fmt: skip
    """What `gather_blocks` returned, perhaps of another pool, into blocks of `pool`; converted to its dtype.

    Raises:
        IndexError: a block, layer or head is not in the pool; nothing was written.
        ValueError: the buffer's shape is not that of these blocks, layers and heads.
        TypeError: the dtypes cannot be converted.
    """
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("a block is named twice: which of the two would stay is not defined")
    shape = staging_shape(pool, len(block_ids), layers, heads, layout)
    _check_staging(staging, shape)
    _move(pool, staging, block_ids, layers, heads, layout, gather=False)


def _check_staging(staging: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(staging.shape) != shape or not staging.is_contiguous():
        raise ValueError(f"`staging` must be contiguous {list(shape)}: {list(staging.shape)}")


def _move(
    pool: Tensor, staging: Tensor, block_ids: Sequence[int], layers: range, heads: range,
    layout: StagingLayout, *, gather: bool,
) -> None:  # fmt: skip
    num_blocks, num_layers, block_size, num_heads, _ = check_pool(pool, 0)
    for name, part, whole in (("layers", layers, num_layers), ("heads", heads, num_heads)):
        if len(part) == 0 or part.step != 1 or part.start < 0 or part.stop > whole:
            raise IndexError(f"{name} {part} are not a range within the pool's {whole}")
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise IndexError(f"no such KV block: {block_id}, there are {num_blocks}")
    if pool.dtype is not staging.dtype:
        # int8 rows carry their scale's bytes and mean nothing in another dtype
        reasons = [why_not_dtype(side) for side in (pool, staging)]
        if reason := next((reason for reason in reasons if reason), None):
            raise TypeError(f"KV of {pool.dtype} cannot be moved as {staging.dtype}: {reason}")
    # Pinned, so that the host does not wait for the stream; kept by torch until it has been copied.
    ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=pool.is_cuda)
    ids = ids.to(pool.device, non_blocking=True)
    row_size = pool.shape[5]
    num_rows = len(layers) * 2 * block_size * len(heads)
    block = next_power_of_2(row_size)
    rows = max(1, _ELEMENTS // block)
    if pool.dtype is staging.dtype:  # bytes as they are, also of dtypes that are not computed with
        pool, staging = _as_integers(pool), _as_integers(staging)
    launch(
        move_blocks_kernel, (len(block_ids), cdiv(num_rows, rows)), pool, staging, ids, len(block_ids),
        num_rows,
        layers.start, heads.start, len(layers), len(heads), block_size, row_size, pool.stride(0),
        pool.stride(1), pool.stride(2), pool.stride(3),
        GATHER=gather, HEADS_FIRST=layout is StagingLayout.HEADS_FIRST, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
