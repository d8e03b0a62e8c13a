"""A step plan as tensors: all rows' tokens one after another, without padding.

1. `Packer.pack` checks every row, then writes into arrays whose memory the tensors are. While the numbers of
   rows and tokens stay the same, so do both.
2. Block tables stay from step to step (`cluster.engine.block_tables`): a decode step writes what is new.
3. The rows of a run (`cluster.engine.following`), which most steps consist of, go on in place
   (`cluster.engine.steps_ahead`): nothing of them is looked at but their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.engine.batch import Row
from cluster.engine.batch_arrays import BatchArrays, Sizes
from cluster.engine.block_tables import BlockTables
from cluster.engine.following import FollowingRows
from cluster.engine.steps_ahead import StepsAhead
from cluster.ids import BlockId


@dataclass(slots=True)
class PackedBatch:
    """Also what attention needs to know (`kernels.ops.AttentionMeta`). Made by a `Packer`, then only read."""

    tokens: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32: all blocks a row has, padded with 0
    slot_mapping: Tensor  # [num_tokens] int64
    logit_rows: Tensor  # [num_samples] int64: of each row that samples the last token, its drafts included


class Packer:
    """Owns the memory of the batch of one runner. A batch is overwritten by the next one."""

    def __init__(self, block_size: int, max_model_len: int, device: torch.device) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._device = device
        self._tables = BlockTables()
        self._arrays, self._table = BatchArrays((0, 0, 0)), np.empty((0, 0), np.int32)
        self._batch: PackedBatch | None = None  # these two as tensors
        self.next_positions = self._arrays.next_positions  # of the token after each row, on the host
        # if the batch is rows of one token each, which sample, in memory of the host
        self._ahead: StepsAhead | None = None
        self._run_rows: Sequence[Row] = ()  # what a run began with if the batch is a step of it ...
        self._num_on = 0  # ... and which one
        self._num_more = 0  # steps of the run that have room in the block tables

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """`rows` is not empty. Of a list of blocks that was packed before, only what was appended is read.

        Raises:
            ValueError: a row without tokens, past `max_model_len`, or whose block table does not cover it.
        """
        if isinstance(rows, FollowingRows):  # the batch turns into the next one, if that is these rows
            num_on, num_more = self._num_on + 1, self._num_more
            if rows.num_on == num_on and rows.run.rows is self._run_rows and num_more:
                self._num_on, self._num_more = num_on, num_more - 1
                assert self._ahead is not None
                assert self._batch is not None
                self._ahead.next(rows.token_ids, num_more, self._table, self._block_size)
                return self._batch
        num_rows = len(rows)
        token_lists = [row.token_ids for row in rows]
        block_lists = [row.block_ids for row in rows]
        num_blocks = [len(blocks) for blocks in block_lists]
        if self._ahead is not None and self._is_next(rows, token_lists, block_lists, num_blocks):
            assert self._batch is not None
            self._begin_run(rows, num_blocks)
            token_ids = [brought[0] for brought in token_lists]
            self._ahead.next(token_ids, self._num_more + 1, self._table, self._block_size)
            return self._batch
        self._ahead = None
        self._num_more = 0
        lengths = np.array([len(token_ids) for token_ids in token_lists], np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        context_lens = starts + lengths
        self._check(rows, lengths, context_lens, num_blocks)

        table = self._tables.update(block_lists, num_blocks)
        query_ends = np.cumsum(lengths, dtype=np.int32)
        num_tokens = int(query_ends[-1])
        logit_rows = _logit_rows(rows, query_ends)
        arrays = self._arrays_of((num_rows, num_tokens, len(logit_rows)), table)
        arrays.query_starts[1:] = query_ends
        arrays.context_lens[:] = context_lens
        arrays.logit_rows[:] = logit_rows
        arrays.tokens[:] = list(chain.from_iterable(token_lists))
        row_of_token = np.repeat(np.arange(num_rows), lengths)
        # token t of row r stands at starts[r] + (t - query_starts[r])
        offsets = (starts - arrays.query_starts[:-1])[row_of_token]
        positions = np.add(np.arange(num_tokens), offsets, out=arrays.positions)
        blocks, within = np.divmod(positions, self._block_size)
        np.multiply(table[row_of_token, blocks], self._block_size, out=blocks)
        np.add(blocks, within, out=arrays.slots)
        arrays.next_positions[:] = context_lens

        batch = self._tensors(arrays, table)
        if num_tokens == num_rows == len(logit_rows) and self._device.type == "cpu":
            self._ahead = StepsAhead(arrays)
            self._begin_run(rows, num_blocks)
        return batch

    def _begin_run(self, rows: Sequence[Row], num_blocks: list[int]) -> None:
        """The batch is these rows: a run may begin with it, or is that far."""
        if isinstance(rows, FollowingRows):
            self._run_rows, self._num_on = rows.run.rows, rows.num_on
        else:
            self._run_rows, self._num_on = rows, 0
        size, most = self._block_size, self._max_model_len
        room = [min(blocks * size, most) - row.start for blocks, row in zip(num_blocks, rows, strict=True)]
        self._num_more = min(room) - 1

    def _is_next(
        self,
        rows: Sequence[Row],
        token_lists: list[Sequence[int]],
        block_lists: list[Sequence[BlockId]],
        num_blocks: list[int],
    ) -> bool:
        """Whether these are the rows of the batch with a token more each, and room for it; blocks that are
        new are in the table then."""
        if len(rows) != self._arrays.sizes[0] or not self._tables.holds(block_lists):
            return False
        if [row.start for row in rows] != self._arrays.context_lens.tolist():
            return False
        if any([len(tokens) != 1 for tokens in token_lists]) or any([row.sample is None for row in rows]):
            return False
        size, most = self._block_size, self._max_model_len
        if any([min(blocks * size, most) <= row.start for blocks, row in zip(num_blocks, rows, strict=True)]):
            return False
        return self._tables.update(block_lists, num_blocks) is self._table

    def _check(
        self,
        rows: Sequence[Row],
        lengths: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        num_blocks: list[int],
    ) -> None:
        short = np.array(num_blocks) * self._block_size < context_lens
        bad = short | (lengths == 0) | (context_lens > self._max_model_len)
        if bad.any():
            _refuse(rows[int(bad.argmax())], self._block_size, self._max_model_len)

    def _arrays_of(self, sizes: Sizes, table: NDArray[np.int32]) -> BatchArrays:
        if sizes != self._arrays.sizes or table is not self._table:
            self._arrays, self._table, self._batch = BatchArrays(sizes), table, None
            self.next_positions = self._arrays.next_positions
        return self._arrays

    def _tensors(self, arrays: BatchArrays, table: NDArray[np.int32]) -> PackedBatch:
        if self._batch is not None:
            return self._batch

        def tensor(array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(array).to(self._device)

        batch = PackedBatch(
            tokens=tensor(arrays.tokens),
            positions=tensor(arrays.positions),
            query_starts=tensor(arrays.query_starts),
            context_lens=tensor(arrays.context_lens),
            block_tables=tensor(table[: arrays.sizes[0]]),
            slot_mapping=tensor(arrays.slots),
            logit_rows=tensor(arrays.logit_rows),
        )
        if self._device.type == "cpu":  # elsewhere they are copies
            self._batch = batch
        return batch


def pack(rows: Sequence[Row], block_size: int, max_model_len: int, device: torch.device) -> PackedBatch:
    """One batch with memory of its own; otherwise as `Packer.pack`."""
    return Packer(block_size, max_model_len, device).pack(rows)


def _logit_rows(rows: Sequence[Row], query_ends: NDArray[np.int32]) -> NDArray[np.int64]:
    """Of each row that samples the last token, and those before its drafts."""
    asked = [
        at
        for end, row in zip(query_ends.tolist(), rows, strict=True)
        if row.sample is not None
        for at in range(end - 1 - row.num_drafts, end)
    ]
    return np.array(asked, np.int64)


def _refuse(row: Row, block_size: int, max_model_len: int) -> NoReturn:
    context_len = row.start + len(row.token_ids)
    if not row.token_ids:
        raise ValueError(f"row of request {row.request} brings no tokens")
    if context_len > max_model_len:
        raise ValueError(f"request {row.request} reaches {context_len} tokens of {max_model_len}")
    raise ValueError(
        f"request {row.request} has {len(row.block_ids)} blocks for {context_len} tokens, "
        f"needs {-(-context_len // block_size)}"
    )
