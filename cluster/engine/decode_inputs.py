"""The inputs of decode steps, in device memory that never moves: a captured graph reads them there.

1. `write` lays a plan's rows out in pinned host memory; `write_next` does so for the step that is expected,
   while the one before it computes. Rows that a bucket has beyond those are padding (`decode_buckets`).
2. Both enqueue copies on the stream of the steps. So they happen when the step before has read its inputs,
   without a second set of them, and while the host goes on: it waits for the tokens that were asked for
   before, not for these copies. The tokens of an expected step never leave the device.
3. Of the block tables only what changed is copied: mostly nothing.

Host memory comes in two sides, used in turn, and each is waited for before it is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.engine.batch import Row
from cluster.engine.block_tables import BlockTables
from cluster.engine.decode_buckets import NextStep
from cluster.engine.device_copies import Mark, host_zeros
from cluster.engine.packed_batch import PackedBatch
from cluster.ids import BlockId

_FEW_ROWS = 8  # of the block tables, that are copied one by one


class DecodeInputs:
    """For steps of up to `most_rows` rows. One thread at a time."""

    def __init__(
        self,
        most_rows: int,
        max_model_len: int,
        block_size: int,
        scratch_block: BlockId,
        device: torch.device,
    ) -> None:
        most_blocks = -(-max_model_len // block_size)
        self._most_rows, self._most_blocks, self._block_size = most_rows, most_blocks, block_size
        self._scratch = [scratch_block]  # the blocks of a padding row
        self._numbers = torch.zeros(_num_words(most_rows), dtype=torch.int64, device=device)
        self._tables = torch.zeros(most_rows, most_blocks, dtype=torch.int32, device=device)
        self._parts = _parts(self._numbers, most_rows)
        self._query_starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most_rows, device=device)
        self._sides = [_Side(most_rows, most_blocks, device) for _ in range(2)]
        self._host_tables = BlockTables()
        self._there: list[tuple[Sequence[BlockId], int]] = []  # list, count: of each row of `_tables`
        self.write((), most_rows)

    def batch(self, num_rows: int) -> PackedBatch:
        """Where a step of `num_rows` rows finds its inputs: the same memory every time."""
        tokens, positions, slots, context_lens = (part[:num_rows] for part in self._parts)
        return PackedBatch(
            tokens=tokens,
            positions=positions,
            query_starts=self._query_starts[: num_rows + 1],
            context_lens=context_lens,
            block_tables=self._tables[:num_rows],
            slot_mapping=slots,
            logit_rows=self._rows[:num_rows],
        )

    def write(self, rows: Sequence[Row], num_rows: int) -> None:
        """The next step computes `rows`, decode rows, and padding up to `num_rows`."""
        self._write(
            [row.block_ids for row in rows],
            [row.start for row in rows],
            [row.token_ids[0] for row in rows],
            num_rows,
        )

    def write_next(self, step: NextStep, token_ids: Tensor, num_rows: int) -> None:
        """The next step is expected to be `step`, with tokens that the device will have in `token_ids`
        [at least as many as it has rows] when it gets there."""
        count = len(step.starts)
        self._write(list(step.lists), list(step.starts), [0] * count, num_rows)
        self._parts[0][:count].copy_(token_ids[:count])

    def _write(
        self,
        lists: list[Sequence[BlockId]],
        starts: list[int],
        token_ids: list[int],
        num_rows: int,
    ) -> None:
        count, size = len(lists), self._block_size
        side = self._sides[0]
        self._sides.reverse()
        side.copied.wait()
        tokens, positions, slots, context_lens = side.parts
        tokens[:count], positions[:count] = token_ids, starts
        tokens[count:num_rows] = positions[count:num_rows] = 0
        lists.extend(repeat(self._scratch, num_rows - count))
        counts = [min(len(blocks), self._most_blocks) for blocks in lists]
        table = self._host_tables.update(lists, counts)
        blocks, within = np.divmod(positions[:num_rows], size)
        slots[:num_rows] = table[np.arange(num_rows), blocks] * np.int64(size) + within
        context_lens[:num_rows] = positions[:num_rows] + 1
        self._numbers.copy_(side.numbers, non_blocking=True)
        self._copy_tables(side, table, lists, counts)
        side.copied.set()

    def _copy_tables(
        self, side: _Side, table: NDArray[np.int32], lists: list[Sequence[BlockId]], counts: list[int]
    ) -> None:
        before, self._there = self._there, list(zip(lists, counts, strict=True))
        changed = []  # (row, first block that is not there yet)
        for row, (blocks, count) in enumerate(self._there):
            old_blocks, old_count = before[row] if row < len(before) else (None, 0)
            if old_blocks is not blocks:
                changed.append((row, 0))
            elif old_count < count:
                changed.append((row, old_count))
        self._there += before[len(lists) :]
        if len(changed) <= _FEW_ROWS:
            for row, first in changed:
                part = slice(first, counts[row])
                side.tables_array[row, part] = table[row, part]
                self._tables[row, part].copy_(side.tables[row, part], non_blocking=True)
        else:
            width = max(counts)
            side.tables_array[: len(lists), :width] = table[: len(lists), :width]
            self._tables[: len(lists)].copy_(side.tables[: len(lists)], non_blocking=True)


class _Side:
    """Host memory for the inputs of one step."""

    def __init__(self, most_rows: int, most_blocks: int, device: torch.device) -> None:
        self.numbers = host_zeros((_num_words(most_rows),), torch.int64, device)
        self.tables = host_zeros((most_rows, most_blocks), torch.int32, device)
        self.parts = [part.numpy() for part in _parts(self.numbers, most_rows)]
        self.tables_array: NDArray[np.int32] = self.tables.numpy()
        self.copied = Mark(device)


def _stride(most_rows: int) -> int:
    """From one of a step's arrays to the next: kernels are compiled for multiples of 16 bytes."""
    return -(-most_rows // 4) * 4


def _num_words(most_rows: int) -> int:
    return 3 * _stride(most_rows) + _stride(most_rows) // 2


def _parts(numbers: Tensor, most_rows: int) -> list[Tensor]:
    """Tokens, positions, slots (int64) and context lengths (int32), [most_rows] each."""
    stride = _stride(most_rows)
    parts = [numbers[index * stride : index * stride + most_rows] for index in range(3)]
    return [*parts, numbers[3 * stride :].view(torch.int32)[:most_rows]]
