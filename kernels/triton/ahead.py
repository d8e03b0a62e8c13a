"""Compiles what serving may need before it serves: no step waits for a compiler.

A kernel has variants: by how a call's work is spread, and by what its rows ask for. Each is called once here,
on a row or two; what comes out is thrown away. Variants are kept on disk by triton, so this takes its time
once per machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import DecoderShape
from kernels.triton import attention, gemm
from kernels.triton.sampling_edits import penalize
from kernels.triton.selection import Choice, draw
from kernels.triton.tiles import Mode, Tiles


@dataclass(slots=True)
class _Meta:
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


def compile_attention(
    shape: DecoderShape, dtype: torch.dtype, pool: Tensor, tiles: Tiles, mode: Mode
) -> None:
    """Decode rows alone, and beside a chunk; each in one split and in several. Reads block 0 of `pool`."""

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    slots = torch.zeros(0, dtype=torch.int64, device=pool.device)
    for starts, contexts in (((0, 1), (1,)), ((0, 1, 3), (1, 2))):
        tables = torch.zeros(len(contexts), 1, dtype=torch.int32, device=pool.device)
        meta = _Meta(index(*starts), index(*contexts), tables, slots)
        q = torch.zeros(starts[-1], shape.num_heads, shape.head_dim, dtype=dtype, device=pool.device)
        for num_splits in (1, 2):
            attention.paged_attention(q, pool, 0, meta, 1.0, tiles, mode, num_splits)


def compile_products(products: Iterable[tuple[Tensor, Tensor | None, torch.dtype]], tiles: Tiles) -> None:
    """`products`: weight, bias and the result's dtype. Parts of sums apart and together."""
    for weight, bias, out_dtype in products:
        x = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for apart in (True, False):
            gemm.linear(x, weight, bias, out_dtype, tiles.gemm_for(weight.element_size()), apart)


def compile_sampling(vocab_size: int, device: torch.device) -> None:
    """Top-k and top-p, each, both and neither; penalties."""
    scores = torch.zeros(1, vocab_size, device=device)
    penalize(scores, np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32))
    for top_k, top_p in itertools.product((0, 1), (1.0, 0.5)):
        draw(scores, [Choice(0, 0, 0.0, 1.0, top_k, top_p, 0.0, 0, 0)])
