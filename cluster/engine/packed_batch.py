"""A step plan as tensors: all rows' tokens one after another, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NoReturn

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
    num_blocks = np.array([len(row.block_ids) for row in rows], dtype=np.int32)
    context_lens = starts + lengths
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    blocks_needed = -(-context_lens // block_size)
    bad = (lengths == 0) | (context_lens > max_model_len) | (num_blocks < blocks_needed)
    if bad.any():
        _refuse(rows[int(bad.argmax())], block_size, max_model_len)

    needed = blocks_needed.tolist()
    block_ids = chain.from_iterable(
        islice(row.block_ids, count) for row, count in zip(rows, needed, strict=True)
    )
    block_tables = np.zeros((len(rows), max(needed)), dtype=np.int32)
    filled = np.arange(block_tables.shape[1], dtype=np.int32) < blocks_needed[:, None]
    block_tables[filled] = np.fromiter(block_ids, dtype=np.int32, count=sum(needed))
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    # token t of row r stands at starts[r] + (t - query_starts[r])
    positions = np.arange(query_starts[-1], dtype=np.int64) + (starts - query_starts[:-1])[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + positions % block_size
    token_ids = chain.from_iterable(row.token_ids for row in rows)
    tokens = np.fromiter(token_ids, dtype=np.int64, count=query_starts[-1])
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
