"""Host side of paged attention: which rows go how. The mathematics is in `kernels.triton.jit.attention`.

1. A batch with a token per sequence is all decode rows: each row and KV head is a tile, and where those are
   too few to fill the device, a row's partitions are spread over splits.
2. Otherwise sequences with several queries are cut into tiles that fold their partitions as they go, and
   those with one query are taken as decode rows beside them.

In `Mode.EXACT` all of it has one tile shape and each partition is a sum of its own, so a row's bits do not
tell which way it went, nor how many splits there were. In `Mode.FAST` a split folds its partitions before
they are combined, and decode rows have a smaller tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ops import PARTITION_SIZE, AttentionMeta
from kernels.triton.checks import aligned, check_shape
from kernels.triton.jit.attention import attention_kernel, combine_kernel
from kernels.triton.launch import cdiv, launch, next_power_of_2
from kernels.triton.tiles import AttentionTile, Mode, Tiles

_PROGRAMS_PER_PROCESSOR = 2  # decode rows are split until about so many run
_PARTIALS_AT_ONCE = 4
_LEAST_DIM = 16  # of a matrix product


def why_not_attention(q: Tensor, pool: Tensor, tiles: Tiles, mode: Mode, most_head_dim: int) -> str | None:
    """What about these shapes no kernel takes."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = pool.shape[4]
    group = num_heads // num_kv_heads
    rows = min(
        tiles.attention_for(head_dim, q.element_size(), group, mode, is_decode).rows
        for is_decode in (True, False)
    )
    if group > rows:
        return f"{group} query heads per KV head, of at most {rows}"
    if head_dim > most_head_dim:
        return f"head_dim {head_dim}, of at most {most_head_dim}"
    return None


def paged_attention(
    q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float, tiles: Tiles, mode: Mode,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """As `kernels.ops.Backend.paged_attention`; `num_splits` None: by how much work there is."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = meta.context_lens.shape[0]
    if num_heads % pool.shape[4] or pool.shape[5] != head_dim:
        raise ValueError(f"`pool` of {list(pool.shape)} does not fit queries of {list(q.shape)}")
    check_shape(meta.query_starts, (num_seqs + 1,), "query_starts")
    check_shape(meta.block_tables, (num_seqs, meta.block_tables.shape[1]), "block_tables")
    for name, index in (("query_starts", meta.query_starts), ("context_lens", meta.context_lens)):
        if index.dtype is not torch.int32 or not index.is_contiguous():
            raise ValueError(f"`{name}` must be int32 and contiguous: {index.dtype}")
    if meta.block_tables.dtype is not torch.int32 or meta.block_tables.stride(1) != 1:
        raise ValueError(f"`block_tables` must be rows of int32: {meta.block_tables.dtype}")
    call = _Call(aligned(q), pool, layer, meta, scale, tiles, mode, num_splits)
    if num_tokens == 0:
        return call.out
    if num_tokens <= num_seqs:
        call.decode(num_tokens, "token")
    else:
        call.prefill("long")
        call.decode(num_seqs, "single")
    return call.out


class _Call:
    """One call's tensors, and the launches it may need."""

    def __init__(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float, tiles: Tiles,
        mode: Mode,
        num_splits: int | None,
    ) -> None:  # fmt: skip
        self.out = torch.empty_like(q)
        self._q, self._pool, self._layer, self._meta = q, pool, layer, meta
        self._scale = scale * math.log2(math.e)
        self._tiles, self._mode, self._num_splits = tiles, mode, num_splits
        self._num_tokens, self._num_heads, self._head_dim = q.shape
        self._num_kv_heads = pool.shape[4]
        self._group = self._num_heads // self._num_kv_heads

    def prefill(self, pick: str) -> None:
        tile = self._tile(is_decode=False)
        queries = tile.rows // self._group
        num_seqs = self._meta.context_lens.shape[0]
        num_tiles = self._num_tokens // queries + num_seqs
        none = self._q.new_empty(0, dtype=torch.float32)
        self._launch(tile, num_tiles, 1, queries, pick, "all", (none, none, none), 0)

    def decode(self, num_rows: int, pick: str) -> None:
        tile = self._tile(is_decode=True)
        most_keys = self._meta.block_tables.shape[1] * self._pool.shape[3]
        most_partitions = max(1, cdiv(most_keys, PARTITION_SIZE))
        splits = self._num_splits or self._splits(num_rows, most_partitions)
        if splits == 1:
            none = self._q.new_empty(0, dtype=torch.float32)
            self._launch(tile, num_rows, 1, 1, pick, "all", (none, none, none), 0)
            return
        keep = "each" if self._mode is Mode.EXACT else "fold"
        most_partials = most_partitions if keep == "each" else splits
        sizes = (num_rows, self._num_heads, most_partials)
        partials = (
            self._q.new_empty(sizes, dtype=torch.float32),
            self._q.new_empty(sizes, dtype=torch.float32),
            self._q.new_empty((*sizes, self._head_dim), dtype=torch.float32),
        )
        self._launch(tile, num_rows, splits, 1, pick, keep, partials, most_partials)
        launch(
            combine_kernel, (num_rows, self._num_heads), self.out, *partials, self._meta.query_starts,
            self._meta.context_lens, self._meta.context_lens.shape[0], splits, self._num_heads, most_partials,
            HEAD_DIM=self._head_dim, DIM=self._dim, PARTITION=PARTITION_SIZE, PICK=pick, KEEP=keep,
            AT_ONCE=_PARTIALS_AT_ONCE, num_warps=1,
        )  # fmt: skip

    def _splits(self, num_rows: int, most_partitions: int) -> int:
        wanted = cdiv(_PROGRAMS_PER_PROCESSOR * self._tiles.num_processors, num_rows * self._num_kv_heads)
        return min(wanted, most_partitions)

    def _tile(self, *, is_decode: bool) -> AttentionTile:
        return self._tiles.attention_for(
            self._head_dim, self._q.element_size(), self._group, self._mode, is_decode
        )

    @property
    def _dim(self) -> int:
        return max(_LEAST_DIM, next_power_of_2(self._head_dim))

    def _launch(
        self, tile: AttentionTile, num_tiles: int, splits: int, queries: int, pick: str, keep: str,
        partials: tuple[Tensor, Tensor, Tensor], most_partials: int,
    ) -> None:  # fmt: skip
        pool, meta = self._pool, self._meta
        launch(
            attention_kernel, (num_tiles, self._num_kv_heads, splits), self._q, pool[0, self._layer],
            self.out,
            *partials, meta.query_starts, meta.context_lens, meta.block_tables, meta.context_lens.shape[0],
            num_tiles, splits, self._scale, pool.stride(0), pool.stride(2), pool.stride(3), pool.stride(4),
            meta.block_tables.stride(0), self._num_heads, most_partials,
            GROUP=self._group, BLOCK_SIZE=pool.shape[3], HEAD_DIM=self._head_dim, DIM=self._dim,
            ROWS=tile.rows,
            QUERIES=queries, PARTITION=PARTITION_SIZE, PICK=pick, KEEP=keep,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
