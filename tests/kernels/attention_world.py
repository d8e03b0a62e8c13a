"""Sequences with random queries, keys and values in a paged pool, and what attention over them should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import dequantize_kv, quantize_kv

LAYER = 1


@dataclass(frozen=True)
class Meta:
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class Sequence:
    """A whole sequence's queries, keys and values, and the blocks it lives in."""

    q: Tensor  # [length, heads, head_dim]
    k: Tensor  # [length, kv_heads, head_dim], as the pool keeps them, in fp32
    v: Tensor
    blocks: list[int]


class World:
    """A pool full of NaN with sequences of the given lengths scattered over it; `size` is that of keys and
    values."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        placement: int = 0,
        kv_int8: bool = False,
        size: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(11)
        shuffle = torch.Generator().manual_seed(placement)
        num_blocks = sum(-(-length // block_size) for length in lengths) + 3
        free = torch.randperm(num_blocks, generator=shuffle).tolist()
        self.scale, self.size = head_dim**-0.5, size
        self.block_size = block_size
        self.pool = torch.full((num_blocks, 2, 2, block_size, heads[1], head_dim), torch.nan, dtype=dtype)
        if kv_int8:
            self.pool = quantize_kv(self.pool)
        self.sequences = []
        for length in lengths:
            q = torch.randn(length, heads[0], head_dim, generator=generator) * 2
            kept = [
                (torch.randn(length, heads[1], head_dim, generator=generator) * size).to(dtype)
                for _ in range(2)
            ]
            kept = [quantize_kv(rows) if kv_int8 else rows for rows in kept]
            k, v = (dequantize_kv(rows) if kv_int8 else rows.float() for rows in kept)
            blocks = [free.pop() for _ in range(-(-length // block_size))]
            sequence = Sequence(q.to(dtype), k, v, blocks)
            positions = torch.arange(length)
            places = torch.tensor(blocks, dtype=torch.long)[positions // block_size], positions % block_size
            for which, rows in enumerate(kept):
                self.pool[places[0], LAYER, which, places[1]] = rows
            self.sequences.append(sequence)

    def attend(self, backend, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """spans of (sequence, start, stop) in one batch → each span's output. Table entries past a
        sequence's context point at blocks of other sequences or nowhere."""
        query_starts = [0]
        for _, start, stop in spans:
            query_starts.append(query_starts[-1] + stop - start)
        width = max(len(self.sequences[index].blocks) for index, _, _ in spans) + 1
        tables = torch.full((len(spans), width), 2**31 - 1, dtype=torch.int32)
        for row, (index, _, stop) in enumerate(spans):
            blocks = self.sequences[index].blocks[: -(-stop // self.block_size)]
            tables[row, : len(blocks)] = torch.tensor(blocks)
        meta = Meta(
            torch.tensor(query_starts, dtype=torch.int32),
            torch.tensor([stop for _, _, stop in spans], dtype=torch.int32),
            tables,
        )
        q = torch.cat([self.sequences[index].q[start:stop] for index, start, stop in spans])
        out = backend.paged_attention(q, self.pool, LAYER, meta, self.scale)
        assert out.dtype == q.dtype
        assert out.shape == q.shape
        return list(out.split([stop - start for _, start, stop in spans]))

    def exact(self, index: int) -> Tensor:
        weights, v = self._weights_and_values(index)
        return (weights @ v).transpose(0, 1)

    def largest_error(self, index: int) -> Tensor:
        """Of an output in bf16: it is rounded once, and its weights may have been; each moves a number by at
        most 2^-8 of itself. In int8, weights times the scales of their values may have become whole 65,280ths
        of the largest instead."""
        weights, v = self._weights_and_values(index)
        rounded = 2**-8 * (weights @ v.abs())
        if self.pool.dtype is torch.int8:
            scales = v.abs().amax(-1) / 127
            steps = (weights * scales[:, None]).amax(-1) / 65280
            seen = (weights > 0).double() @ (v.abs() / scales[..., None].clamp(min=1e-300))
            rounded += steps[..., None] / 2 * seen
        return 2**-8 * self.exact(index).abs() + rounded.transpose(0, 1) + 1e-5 * self.size

    def _weights_and_values(self, index: int) -> tuple[Tensor, Tensor]:
        sequence = self.sequences[index]
        group = sequence.q.shape[1] // sequence.k.shape[1]
        q = sequence.q.double().transpose(0, 1)
        k, v = (t.double().transpose(0, 1).repeat_interleave(group, dim=0) for t in (sequence.k, sequence.v))
        length = q.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1), v
