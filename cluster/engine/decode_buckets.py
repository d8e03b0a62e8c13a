"""Which decode steps have a shape that was prepared, and what is padding in it. No tensors.

1. A worker prepares a few numbers of rows when it starts (`bucket_sizes`). A graph is captured for each, and
   for each kind of drawing (`kernels.draw_kind`).
2. A plan goes by a bucket if it is a decode step (`is_decode`) and one is large enough (`find_bucket`). The
   rows it lacks are padding: one token at position 0 that reads and writes the scratch block, which belongs
   to nobody, so that whatever their numbers are, nobody has them.
3. After a step it is written down what the next one would be if every row went on (`NextStep`), and its
   inputs are prepared while the device computes. If the plan that comes is that one, it only has to be
   started; otherwise its inputs are prepared anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.ids import BlockId

MOST_ROWS = 512  # of a bucket: a larger step takes longer than its launches
_LEAST_STEP = 16  # between sizes above it; below they are powers of two


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, ..., from 128 on apart by a quarter of the power of two below, up to
    `max_num_seqs` or `MOST_ROWS`: at most 15 rows are padding up to 128, then less than a fifth."""
    most = min(max_num_seqs, MOST_ROWS)
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        step = last if last < _LEAST_STEP else max(_LEAST_STEP, (1 << last.bit_length()) // 8)
        sizes.append(min(last + step, most))
    return tuple(sizes)


def find_bucket(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds so many rows; None if none does."""
    return next((size for size in sizes if size >= num_rows), None)


def is_decode(plan: StepPlan, block_size: int, max_model_len: int) -> bool:
    """Whether every row brings one token, has a block for it and is due the next, and nothing else is wanted.
    A plan that cannot be computed at all is no decode step either: `Packer.pack` says what is wrong with it.
    """
    return bool(plan.rows) and all(
        len(row.token_ids) == 1
        and row.sample is not None
        and row.score is None
        and not row.sample.notes.scores
        and row.start < max_model_len
        and row.start < len(row.block_ids) * block_size
        for row in plan.rows
    )


@dataclass(frozen=True, slots=True)
class NextStep:
    """What a decode step is if every row of the one before, a decode step too, goes on with the token it got.

    The lists of blocks are those of the sequences themselves, which only ever append: a row is known by its
    list, and keeping the list here means that no other can be taken for it.
    """

    lists: tuple[Sequence[BlockId], ...]
    samples: tuple[SampleSpec | None, ...]
    starts: tuple[int, ...]

    @classmethod
    def after(cls, rows: Sequence[Row], block_size: int, max_model_len: int) -> NextStep | None:
        """None where a row has no block for another token yet, or is as long as a sequence can be."""
        starts = tuple(row.start + 1 for row in rows)
        for row, start in zip(rows, starts, strict=True):
            if start >= min(max_model_len, len(row.block_ids) * block_size):
                return None
        return cls(tuple(row.block_ids for row in rows), tuple(row.sample for row in rows), starts)

    def is_plan(self, plan: StepPlan, token_ids: Sequence[int]) -> bool:
        """Whether `plan` is this step; `token_ids` are those the rows got."""
        rows = plan.rows
        return (
            not plan.copies
            and len(rows) == len(self.lists) == len(token_ids)
            and all(
                row.block_ids is blocks
                and row.start == start
                and len(row.token_ids) == 1
                and row.token_ids[0] == token_id
                and row.sample is sample
                and row.score is None
                for row, blocks, sample, start, token_id in zip(
                    rows, self.lists, self.samples, self.starts, token_ids, strict=True
                )
            )
        )
