"""A step plan as tensors: all rows' tokens one after another, without padding.

1. `Packer.pack` looks at each row once: checks it, and appends what it brings to lists. These are written, in
   two goes, to memory which the tensors are. Batches of one size use the same ones. Numpy would be quicker
   for a thousand tokens, but a step's caches are cold: each of its functions costs as much as ten rows then.
2. Block tables stay from step to step (`cluster.engine.block_tables`): a decode step writes what is new.
3. The rows of a run (`cluster.engine.following`), which most steps consist of, go on in place
   (`cluster.engine.steps_ahead`): nothing of them is looked at but their tokens. So do the same rows in a
   step that was planned, once they have been compared. Where the backend moves them on itself, it only says
   so (`gone_on`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, NoReturn

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

_MOST_SIZES: Final = 64  # of which batches are kept


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


class _Made(NamedTuple):
    """What batches of one size use, in turn."""

    arrays: BatchArrays
    batch: PackedBatch  # these, and the block tables, as tensors
    ahead: StepsAhead | None  # if it is rows of one token each, which sample


class Packer:
    """Owns the memory of the batches of one runner. A batch is overwritten by the next one of its size."""

    def __init__(self, block_size: int, max_model_len: int, device: torch.device) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._device = device
        self._tables = BlockTables()
        self._table = np.empty((0, 0), np.int32)
        self._made: dict[Sizes, _Made] = {}  # on the CPU, where tensors are this memory
        self._now: _Made | None = None  # the batch
        self.next_positions = np.empty(0, np.int64)  # of the tokens that `logit_rows` ask for, on the host
        # if that is rows of one token each, which sample, in memory of the host:
        self._lists: list[Sequence[BlockId]] = []  # their blocks ...
        self._ends: list[int] = []  # ... and context lengths when it was packed, ...
        self._num_since = 0  # ... how many steps they have gone on since ...
        self._num_more = 0  # ... and may yet, in the blocks of the tables
        self._run_rows: Sequence[Row] = ()  # what a run began with if it is a step of it ...
        self._num_on = 0  # ... and which one

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """`rows` is not empty. Of a list of blocks that was packed before, only what was appended is read.

        Raises:
            ValueError: a row without tokens, past `max_model_len`, or whose block table does not cover it.
        """
        if not self._num_more:
            return self._pack_anew(rows)
        # the batch may turn into the next one, if that is the same rows
        if type(rows) is FollowingRows:
            num_on = self._num_on + 1
            if rows.num_on != num_on or rows.run.rows is not self._run_rows:
                return self._pack_anew(rows)
            token_ids = rows.token_ids
            self._num_on = num_on
        else:
            if not self._is_next(rows):
                return self._pack_anew(rows)
            token_ids = [row.token_ids[0] for row in rows]
            self._run_rows, self._num_on = rows, 0
        now, num_more = self._now, self._num_more
        assert now is not None
        ahead = now.ahead
        assert ahead is not None
        if not ahead.steps:
            ahead.lay_out(num_more, self._table, self._block_size)
        ahead.tokens[:] = token_ids
        ahead.places[:] = ahead.steps.pop()
        self._num_since += 1
        self._num_more = num_more - 1
        return now.batch

    @property
    def num_more(self) -> int:
        """Steps by which the batch may go on in its own memory: 0 unless it is rows of one token each, which
        sample, on the CPU."""
        return self._num_more

    def gone_on(self, num_steps: int) -> None:
        """Somebody has moved the batch on by so many steps of the run that it is of."""
        now = self._now
        assert now is not None
        assert now.ahead is not None
        now.ahead.steps.clear()  # which are from where it was
        self._num_since += num_steps
        self._num_more -= num_steps
        self._num_on += num_steps

    def forget(self) -> None:
        """The batch may be in between two steps: the next one is packed anew."""
        self._num_more = 0

    def _pack_anew(self, rows: Sequence[Row]) -> PackedBatch:
        size, most = self._block_size, self._max_model_len
        num_more = most
        tokens: list[int] = []
        logit_rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        next_positions: list[int] = []
        context_lens: list[int] = []
        query_starts = [0]
        block_lists: list[Sequence[BlockId]] = []
        num_blocks: list[int] = []
        for row in rows:
            brought, start, blocks = row.token_ids, row.start, row.block_ids
            count = len(blocks)
            end, room = start + len(brought), min(count * size, most)
            if end > room or end == start:
                _refuse(row, size, most)
            if room - end < num_more:
                num_more = room - end
            block_lists.append(blocks)
            num_blocks.append(count)
            context_lens.append(end)
            if start + 1 == end:
                tokens.append(brought[0])
                positions.append(start)
                slots.append(blocks[start // size] * size + start % size)
            else:
                tokens += brought
                positions += range(start, end)
                for index in range(start // size, -(-end // size)):
                    first = index * size  # position in the block's first slot
                    slot = blocks[index] * size
                    slots += range(slot + max(start - first, 0), slot + min(end - first, size))
            num_tokens = len(tokens)
            query_starts.append(num_tokens)
            if row.sample is not None:
                if row.num_drafts:
                    logit_rows += range(num_tokens - 1 - row.num_drafts, num_tokens)
                    next_positions += range(end - row.num_drafts, end + 1)
                else:
                    logit_rows.append(num_tokens - 1)
                    next_positions.append(end)
        self._num_more = 0  # if anything below fails, the next batch is packed anew
        table = self._tables.update(block_lists, num_blocks)
        now = self._now = self._of_size((len(num_blocks), len(tokens), len(logit_rows)), table)
        now.arrays.write(tokens, logit_rows, positions, slots, next_positions, context_lens, query_starts)
        self.next_positions = now.arrays.next_positions
        if now.ahead is not None:
            now.ahead.steps.clear()
            self._lists, self._ends, self._num_since, self._num_more = block_lists, context_lens, 0, num_more
            if type(rows) is FollowingRows:
                self._run_rows, self._num_on = rows.run.rows, rows.num_on
            else:
                self._run_rows, self._num_on = rows, 0
        return now.batch if self._device.type == "cpu" else _on(self._device, now.batch)

    def _is_next(self, rows: Sequence[Row]) -> bool:
        """Whether these are the rows of the batch, each with the token after its last one; blocks that are
        new are in the tables then."""
        if len(rows) != len(self._ends):
            return False
        num_since = self._num_since
        for row, blocks, end in zip(rows, self._lists, self._ends, strict=True):
            if row.block_ids is not blocks or row.start != end + num_since:
                return False
            if len(row.token_ids) != 1 or row.sample is None:
                return False
        num_blocks = [len(blocks) for blocks in self._lists]
        return self._tables.update(self._lists, num_blocks) is self._table

    def _of_size(self, sizes: Sizes, table: NDArray[np.int32]) -> _Made:
        if table is not self._table:
            self._table = table
            self._made.clear()
        made = self._made.get(sizes)
        if made is None:
            if len(self._made) >= _MOST_SIZES:
                self._made.clear()
            arrays = BatchArrays(sizes)
            tokens, logit_rows, positions, slots, context_lens, query_starts = arrays.tensors()
            tables = torch.from_numpy(table[: sizes[0]])
            batch = PackedBatch(tokens, positions, query_starts, context_lens, tables, slots, logit_rows)
            one_each = sizes[0] == sizes[1] == sizes[2] and self._device.type == "cpu"
            made = _Made(arrays, batch, StepsAhead(arrays) if one_each else None)
            self._made[sizes] = made
        return made


def pack(rows: Sequence[Row], block_size: int, max_model_len: int, device: torch.device) -> PackedBatch:
    """One batch with memory of its own; otherwise as `Packer.pack`."""
    return Packer(block_size, max_model_len, device).pack(rows)


def _on(device: torch.device, batch: PackedBatch) -> PackedBatch:
    """A copy there."""
    return PackedBatch(*[getattr(batch, field.name).to(device) for field in fields(batch)])


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
