"""Copying blocks between pools and staging buffers: the one place where an edge touches KV bytes.

1. A `BlockRegion` is the part of every block that an edge carries: a view of the pool, cut to the edge's
   layers and heads, or a staging buffer of that shape.
2. `copy_blocks` moves listed blocks from one region to another. Where the part is contiguous within a block
   (all heads: always so with one rank per group) it is a plain memory copy, of runs of neighbouring blocks
   at once; otherwise a strided tensor copy.
3. On a GPU the copies are enqueued on the calling thread's stream, and done when that stream is
   (`cluster.kv.edge_device`).
4. `gather_blocks` and `scatter_blocks` move blocks between a pool and the first blocks of a staging slot.
   Where both are on one GPU and the blocks lie apart, a `Mover` may do so in one launch; else it is a copy.

Plain copies of host memory run in the calling thread alone and without the GIL: they neither stop the engine
thread nor start a second OpenMP team beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cluster.errors import EdgeError
from cluster.kv.layout import KVLayout, LayoutEdge, local_range

MAX_COPY_BYTES = 8 * 2**20  # between two looks at `stopped`


class Cut(NamedTuple):
    """Which part of every block of a contiguous pool."""

    pool: Tensor
    layers: range
    heads: range


class Mover(Protocol):
    """Moves blocks of a pool to and from a contiguous buffer of their parts in one launch. `num_runs`: copies
    that it would take otherwise. False: it did nothing, and they are to be copied."""

    def gather(self, cut: Cut, block_ids: Sequence[int], staging: Tensor, num_runs: int) -> bool: ...

    def scatter(self, staging: Tensor, cut: Cut, block_ids: Sequence[int], num_runs: int) -> bool: ...


class BlockRegion:
    """A view `[num_blocks, num_layers, 2, block_size, num_heads, row_size]`; keeps its memory alive."""

    def __init__(self, blocks: Tensor, cut: Cut | None = None) -> None:
        """`cut`: the view is that of a pool."""
        self.blocks = blocks
        self.cut = cut
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
        cut = Cut(pool, range(layers.start, layers.stop), range(heads.start, heads.stop))
        return cls(pool[:, layers, :, :, heads, :], cut)


def gather_blocks(
    source: BlockRegion, block_ids: Sequence[int], slot: BlockRegion, mover: Mover | None
) -> None:
    """Block `block_ids[i]` of a pool → block i of a staging slot. Raises as `copy_blocks`."""
    into = range(len(block_ids))
    _check(source, block_ids, slot, into)
    if mover is not None and source.cut is not None and source.blocks.device == slot.blocks.device:
        num_runs = sum(1 for _ in _runs(block_ids, into, len(block_ids)))
        if mover.gather(source.cut, block_ids, slot.blocks[: len(into)], num_runs):
            return
    copy_blocks(source, block_ids, slot, into, lambda: False)


def scatter_blocks(
    slot: BlockRegion,
    target: BlockRegion,
    block_ids: Sequence[int],
    mover: Mover | None,
    stopped: Callable[[], bool],
) -> bool:
    """Block i of a staging slot → block `block_ids[i]` of a pool. As `copy_blocks`."""
    outof = range(len(block_ids))
    _check(slot, outof, target, block_ids)
    if mover is not None and target.cut is not None and target.blocks.device == slot.blocks.device:
        if stopped():
            return False
        num_runs = sum(1 for _ in _runs(outof, block_ids, len(block_ids)))
        if mover.scatter(slot.blocks[: len(outof)], target.cut, block_ids, num_runs):
            return True
    return copy_blocks(slot, outof, target, block_ids, stopped)


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
    _check(source, source_ids, target, target_ids)
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


def _check(
    source: BlockRegion, source_ids: Sequence[int], target: BlockRegion, target_ids: Sequence[int]
) -> None:
    """
    Raises:
        EdgeError: see `copy_blocks`.
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
