"""A step plan as tensors: all rows' tokens one after another, without padding.

1. `Packer.pack` checks every row, then writes into arrays that grow by doubling and are used again and again.
2. Block tables stay from step to step (`cluster.engine.block_tables`): a decode step writes what is new.
3. The tensors are views of those arrays. While the numbers of rows and tokens stay the same, so do the views.
4. The rows of a run (`cluster.engine.following`), which most steps consist of, go on in place
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
from cluster.engine.block_tables import BlockTables
from cluster.engine.following import FollowingRows
from cluster.engine.steps_ahead import StepsAhead
from cluster.ids import BlockId

MOST_AHEAD = 16  # steps of a run that are laid out at once


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
        self._batch: PackedBatch | None = None  # views for the sizes and the table below
        self._sizes = (0, 0, 0)  # rows, tokens, samples
        self._table: NDArray[np.int32] | None = None
        # if the batch is rows of one token each, which sample, in memory of the host
        self._ahead: StepsAhead | None = None
        self.next_positions = np.empty(0, np.int32)  # of the token after each row, on the host
        self._run_rows: Sequence[Row] = ()  # what a run began with if the batch is a step of it ...
        self._num_on = 0  # ... and which one
        self._num_more = 0  # steps of the run that have room in the block tables
        self._per_row = _RowArrays(8)
        self._per_token = _TokenArrays(64)

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """`rows` is not empty. Of a list of blocks that was packed before, only what was appended is read.

        Raises:
            ValueError: a row without tokens, past `max_model_len`, or whose block table does not cover it.
        """
        if isinstance(rows, FollowingRows) and self._goes_on(rows):
            assert self._batch is not None
            return self._batch
        num_rows = len(rows)
        token_lists = [row.token_ids for row in rows]
        block_lists = [row.block_ids for row in rows]
        num_blocks = [len(blocks) for blocks in block_lists]
        if self._ahead is not None and self._is_next(rows, token_lists, block_lists, num_blocks):
            assert self._batch is not None
            self._begin_run(rows, num_blocks)
            self._go_on(self._ahead, [token_ids[0] for token_ids in token_lists], self._num_more + 1)
            return self._batch
        self._ahead = None
        self._num_more = 0
        if num_rows > len(self._per_row.starts):
            self._per_row, self._batch = _RowArrays(2 * num_rows), None
        per_row = self._per_row
        starts, lengths = per_row.starts[:num_rows], per_row.lengths[:num_rows]
        starts[:] = [row.start for row in rows]
        lengths[:] = [len(tokens) for tokens in token_lists]
        context_lens = np.add(starts, lengths, out=per_row.context_lens[:num_rows])
        self.next_positions = context_lens
        self._check(rows, lengths, context_lens, num_blocks)

        table = self._tables.update(block_lists, num_blocks)
        query_ends = np.cumsum(lengths, out=per_row.query_starts[1 : num_rows + 1])
        num_tokens = int(query_ends[-1])
        if num_tokens > len(self._per_token.tokens):
            self._per_token, self._batch = _TokenArrays(2 * num_tokens), None
        self._per_token.tokens[:num_tokens] = list(chain.from_iterable(token_lists))
        positions = self._per_token.positions[:num_tokens]
        if num_tokens == num_rows:  # one token each
            row_of_token = per_row.indices[:num_rows]
            positions[:] = starts
        else:
            row_of_token = np.repeat(per_row.indices[:num_rows], lengths)
            # token t of row r stands at starts[r] + (t - query_starts[r])
            offsets = (starts - per_row.query_starts[:num_rows])[row_of_token]
            np.add(np.arange(num_tokens), offsets, out=positions)
        blocks, within = np.divmod(positions, self._block_size)
        np.multiply(table[row_of_token, blocks], self._block_size, out=blocks)
        np.add(blocks, within, out=self._per_token.slots[:num_tokens])

        num_samples = self._ask(rows, query_ends)
        batch = self._views((num_rows, num_tokens, num_samples), table)
        if num_tokens == num_rows == num_samples and self._device.type == "cpu":
            tokens, slots = self._per_token.tokens[:num_rows], self._per_token.slots[:num_rows]
            self._ahead = StepsAhead(tokens, positions, slots, context_lens)
            self._begin_run(rows, num_blocks)
        return batch

    def _ask(self, rows: Sequence[Row], query_ends: NDArray[np.int32]) -> int:
        """Write `logit_rows`; how many there are."""
        samples = [index for index, row in enumerate(rows) if row.sample is not None]
        num_samples = len(samples)
        if any([row.num_drafts for row in rows]):
            last = zip(
                query_ends[samples].tolist(), [rows[index].num_drafts for index in samples], strict=True
            )
            asked = [at for end, num_drafts in last for at in range(end - 1 - num_drafts, end)]
            num_samples = len(asked)
            self._per_token.logit_rows[:num_samples] = asked
        else:
            ends = query_ends if num_samples == len(rows) else query_ends[samples]
            np.subtract(ends, 1, out=self._per_token.logit_rows[:num_samples])
        return num_samples

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
        if len(rows) != self._sizes[0] or not self._tables.holds(block_lists):
            return False
        if [row.start for row in rows] != self._per_row.context_lens[: len(rows)].tolist():
            return False
        if any([len(tokens) != 1 for tokens in token_lists]) or any([row.sample is None for row in rows]):
            return False
        size, most = self._block_size, self._max_model_len
        if any([min(blocks * size, most) <= row.start for blocks, row in zip(num_blocks, rows, strict=True)]):
            return False
        return self._tables.update(block_lists, num_blocks) is self._table

    def _goes_on(self, rows: FollowingRows) -> bool:
        """Turn the batch into the next one, if that is these rows."""
        num_on, num_more = self._num_on + 1, self._num_more
        if rows.num_on != num_on or rows.run.rows is not self._run_rows or not num_more:
            return False
        assert self._ahead is not None
        self._num_on = num_on
        self._num_more -= 1
        self._go_on(self._ahead, rows.token_ids, num_more)
        return True

    def _go_on(self, ahead: StepsAhead, token_ids: Sequence[int], room: int) -> None:
        """`room`: steps for which the tables have blocks, this one included."""
        if not ahead:
            assert self._table is not None
            ahead.lay_out(min(room, MOST_AHEAD), self._table, self._block_size)
        ahead.next(token_ids)

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

    def _views(self, sizes: tuple[int, int, int], table: NDArray[np.int32]) -> PackedBatch:
        if self._batch is not None and sizes == self._sizes and table is self._table:
            return self._batch
        num_rows, num_tokens, num_samples = sizes
        per_row, per_token = self._per_row, self._per_token

        def tensor(array: NDArray[np.int64] | NDArray[np.int32], size: int) -> Tensor:
            return torch.from_numpy(array[:size]).to(self._device)

        batch = PackedBatch(
            tokens=tensor(per_token.tokens, num_tokens),
            positions=tensor(per_token.positions, num_tokens),
            query_starts=tensor(per_row.query_starts, num_rows + 1),
            context_lens=tensor(per_row.context_lens, num_rows),
            block_tables=tensor(table, num_rows),
            slot_mapping=tensor(per_token.slots, num_tokens),
            logit_rows=tensor(per_token.logit_rows, num_samples),
        )
        if self._device.type == "cpu":  # elsewhere they are copies
            self._batch, self._sizes, self._table = batch, sizes, table
        return batch


class _RowArrays:
    def __init__(self, num_rows: int) -> None:
        self.starts = np.empty(num_rows, np.int32)
        self.lengths = np.empty(num_rows, np.int32)
        self.context_lens = np.empty(num_rows, np.int32)
        self.query_starts = np.zeros(num_rows + 1, np.int32)
        self.indices = np.arange(num_rows)


class _TokenArrays:
    def __init__(self, num_tokens: int) -> None:
        self.tokens = np.empty(num_tokens, np.int64)
        self.positions = np.empty(num_tokens, np.int64)
        self.slots = np.empty(num_tokens, np.int64)
        self.logit_rows = np.empty(num_tokens, np.int64)


def pack(rows: Sequence[Row], block_size: int, max_model_len: int, device: torch.device) -> PackedBatch:
    """One batch with memory of its own; otherwise as `Packer.pack`."""
    return Packer(block_size, max_model_len, device).pack(rows)


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
