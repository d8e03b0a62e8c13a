"""The operations a model is made of: meaning, shapes, dtypes. Backends implement them, tests hold them to it.

Every backend keeps two promises:

- **Row invariance.** The bits of an output row depend on that row's inputs only, not on how many rows
  are computed together, where the row stands, how many threads run, or how a prompt was chunked.
- **Fixed KV partitions.** Attention reduces keys in partitions of `PARTITION_SIZE` positions, counted
  from position 0, and combines the partitions in order, whatever the query length or block size.

Activations are `[num_tokens, ...]`, contiguous, of the model's dtype (fp32 or bf16); sums are carried
in fp32.
"""

from __future__ import annotations

from typing import Any, NewType, Protocol

import torch
from torch import Tensor

PARTITION_SIZE = 128  # key positions reduced at a time; a multiple of every supported block size

PackedWeight = NewType("PackedWeight", object)  # opaque to the model; made by `pack_linear` only


class AttentionMeta(Protocol):
    """Shape of a packed batch as attention sees it; all tensors int32 on the compute device."""

    query_starts: Tensor  # [num_seqs + 1], prefix sum of query lengths
    context_lens: Tensor  # [num_seqs], keys visible to the last query of each sequence
    block_tables: Tensor  # [num_seqs, max_blocks]
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset


class Backend(Protocol):
    """One implementation of all operations on one device."""

    name: str
    device: torch.device

    def pack_linear(self, weight: Tensor) -> Any:
        """weight [out, in] → whatever `linear` wants. Done once per weight; may return a tensor that is
        saved to and mapped from the weight cache (see `packed_layout`)."""
        ...

    @property
    def packed_layout(self) -> str:
        """Names the format `pack_linear` returns, e.g. "rows", "vnni2x16": part of the cache key."""
        ...

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
        """y[m, n] = Σ_k x[m, k]·w[n, k] + b[n]. x [num_tokens, in] → [num_tokens, out], x's dtype."""
        ...

    def linear_fp32(self, x: Tensor, packed: Any) -> Tensor:
        """As `linear` without bias, result in fp32: the logits."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """y = x · rsqrt(mean(x²) + eps) · w over the last dimension (Zhang & Sennrich 2019).
        The square, mean and product in fp32; rounded once to x's dtype before the multiply by w, as
        the published models do."""
        ...

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate halves (GPT-NeoX order; Su et al. 2021). x [num_tokens, heads, head_dim], positions
        [num_tokens] int64, cos/sin [max_positions, head_dim // 2] fp32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2·n] → silu(first half)·second half, [num_tokens, n]."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Scatter k, v [num_tokens, kv_heads, head_dim] into pool
        [num_blocks, num_layers, 2, block_size, kv_heads, head_dim] at `layer` and the given slots."""
        ...

    def paged_attention(
        self, q: Tensor, pool: Tensor, layer: int, meta: AttentionMeta, scale: float
    ) -> Tensor:
        """Causal attention of q [num_tokens, heads, head_dim] over each sequence's paged keys; query
        head h reads KV head h // (heads // kv_heads). Query i of a sequence with query length n and
        context length c stands at position c - n + i and sees keys [0, position]. Returns q's shape."""
        ...
