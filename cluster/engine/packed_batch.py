"""A step plan as tensors: all rows' tokens one after another, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.batch import Row


@dataclass(slots=True)
class PackedBatch:
    """Also what attention needs to know (`kernels.ops.AttentionMeta`). Made by `pack`, then only read."""

    tokens: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    slot_mapping: Tensor  # [num_tokens] int64
    logit_rows: Tensor  # [num_samples] int64: last token of each row that samples


def pack(rows: Sequence[Row], block_size: int, max_model_len: int, device: torch.device) -> PackedBatch:
    """`rows` is not empty.

    Raises:
        ValueError: a row without tokens, past `max_model_len`, or whose block table does not cover it.
    """
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    context_lens = starts + lengths
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    blocks_needed = -(-context_lens // block_size)
    _check(rows, lengths, context_lens, blocks_needed, max_model_len)

    block_tables = np.zeros((len(rows), int(blocks_needed.max())), dtype=np.int32)
    for index, row in enumerate(rows):
        block_tables[index, : blocks_needed[index]] = row.block_ids[: blocks_needed[index]]
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    # token t of row r stands at starts[r] + (t - query_starts[r])
    positions = np.arange(query_starts[-1], dtype=np.int64) + (starts - query_starts[:-1])[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + positions % block_size
    tokens = np.fromiter((t for row in rows for t in row.token_ids), dtype=np.int64, count=query_starts[-1])
    samples = [index for index, row in enumerate(rows) if row.sample is not None]
    logit_rows = query_starts[1:][samples].astype(np.int64) - 1

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.int32]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedBatch(
        tokens=tensor(tokens),
        positions=tensor(positions),
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(block_tables),
        slot_mapping=tensor(slot_mapping),
        logit_rows=tensor(logit_rows),
    )


def _check(
    rows: Sequence[Row],
    lengths: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    context_lens: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    blocks_needed: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    max_model_len: int,
) -> None:
    for index, row in enumerate(rows):
        if lengths[index] == 0:
            raise ValueError(f"row of request {row.request} brings no tokens")
        if context_lens[index] > max_model_len:
            raise ValueError(f"request {row.request} reaches {context_lens[index]} tokens of {max_model_len}")
        if len(row.block_ids) < blocks_needed[index]:
            raise ValueError(
                f"request {row.request} has {len(row.block_ids)} blocks for {context_lens[index]} tokens, "
                f"needs {blocks_needed[index]}"
            )
