"""Copying blocks between pools and staging buffers: the one place where an edge touches KV bytes.

1. A `BlockRegion` is the part of every block that an edge carries: a view of the pool, cut to the edge's
   layers and heads, or a staging buffer of that shape.
2. `copy_blocks` moves listed blocks from one region to another. Where the part is contiguous within a block
   (all heads: always so with one rank per group) it is a plain memory copy, of runs of neighbouring blocks
   at once; otherwise a strided tensor copy.
3. On a GPU the copies are enqueued on the calling thread's stream, and done when that stream is
   (`cluster.kv.edge_device`).

Plain copies of host memory run in the calling thread alone and without the GIL: they neither stop the engine
thread nor start a second OpenMP team beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from cluster.errors import EdgeError
from cluster.kv.layout import KVLayout, LayoutEdge, local_range

MAX_COPY_BYTES = 8 * 2**20  # between two looks at `stopped`


class BlockRegion:
    """A view `[num_blocks, num_layers, 2, block_size, num_heads, row_size]`; keeps its memory alive."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.is_on_host = blocks.device.type == "cpu"
        self.num_blocks = int(blocks.shape[0])
        self.block_bytes = int(blocks[0].numel()) * int(blocks.element_size())
        self.stride_bytes = int(blocks.stride(0)) * int(blocks.element_size())
        self.is_plain = bool(blocks[0].is_contiguous())  # within each block
        self.address = int(blocks.data_ptr())

    @classmethod
    def of_pool(cls, pool: Tensor, layout: KVLayout, edge: LayoutEdge) -> BlockRegion:
        """What `edge` carries of a pool `layout.shape`."""
        layers, heads = local_range(edge.layers, layout.layers), local_range(edge.heads, layout.heads)
        return cls(pool[:, layers, :, :, heads, :])


def copy_blocks(
    source: BlockRegion,
    source_ids: Sequence[int],
    target: BlockRegion,
    target_ids: Sequence[int],
    stopped: Callable[[], bool],
) -> bool:
    """Copy block `source_ids[i]` to `target_ids[i]`, in order, until done or `stopped()`.

    Returns:
        Whether all was copied, or on a GPU enqueued.

    Raises:
        EdgeError: the regions differ in shape, or an id is outside its region; nothing was copied.
    """
    if source.blocks.shape[1:] != target.blocks.shape[1:] or source.blocks.dtype != target.blocks.dtype:
        raise EdgeError(
            f"KV blocks do not fit: {tuple(source.blocks.shape[1:])} {source.blocks.dtype} into "
            f"{tuple(target.blocks.shape[1:])} {target.blocks.dtype}"
        )
    if len(source_ids) != len(target_ids):
        raise EdgeError(f"{len(source_ids)} KV blocks cannot be copied to {len(target_ids)}")
    for region, ids in ((source, source_ids), (target, target_ids)):
        for block_id in ids:
            if not 0 <= block_id < region.num_blocks:
                raise EdgeError(f"no such KV block: {block_id}, there are {region.num_blocks}")
    if not (source.is_on_host and target.is_on_host):
        for source_id, target_id, length in _runs(source_ids, target_ids, len(source_ids)):
            if stopped():
                return False
            run = source.blocks[source_id : source_id + length]
            target.blocks[target_id : target_id + length].copy_(run, non_blocking=True)
        return True
    if not (source.is_plain and target.is_plain):
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            if stopped():
                return False
            target.blocks[target_id].copy_(source.blocks[source_id])
        return True
    packed = source.stride_bytes == source.block_bytes == target.stride_bytes
    max_run = max(1, MAX_COPY_BYTES // source.block_bytes) if packed else 1
    for source_id, target_id, length in _runs(source_ids, target_ids, max_run):
        if stopped():
            return False
        ctypes.memmove(
            target.address + target_id * target.stride_bytes,
            source.address + source_id * source.stride_bytes,
            length * source.block_bytes,
        )
    return True


def _runs(
    source_ids: Sequence[int], target_ids: Sequence[int], max_run: int
) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, length) of stretches that are consecutive on both sides."""
    start = 0
    for end in range(1, len(source_ids) + 1):
        if (
            end < len(source_ids)
            and end - start < max_run
            and source_ids[end] == source_ids[end - 1] + 1
            and target_ids[end] == target_ids[end - 1] + 1
        ):
            continue
        yield source_ids[start], target_ids[start], end - start
        start = end
