"""A forward pass of few launches: what the operations one by one compute, bit for bit.

1. Embedding rows are the residual stream.
2. Per layer: residual addition and norm in one kernel, q, k and v in one product, rotation and KV write in
   one kernel, attention, output product, addition and norm, gate and up in one product, their SiLU·mul, down.
3. The last addition and norm are computed for all rows, logits for the rows that ask for them.

A call that a fused kernel does not take goes through the backend's single operations, which fall back on
their own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import (
    Backend,
    DecoderShape,
    DecoderWeights,
    FusedSampler,
    LayerWeights,
    StepBatch,
    StepResult,
)
from kernels.triton import rowwise
from kernels.triton.ahead import compile_attention, compile_products
from kernels.triton.attention import why_not_attention
from kernels.triton.availability import interpreting
from kernels.triton.checks import MOST_COLUMNS, MOST_HEAD_DIM, why_not_dtype
from kernels.triton.fallback import Fallbacks
from kernels.triton.tiles import Mode, Tiles


class TritonForward:
    """`kernels.ops.FusedForward`. Its results are tensors of their own."""

    needs_no_mode: Final = False

    def __init__(
        self,
        backend: Backend,
        tiles: Tiles,
        mode: Mode,
        fallbacks: Fallbacks,
        shape: DecoderShape,
        weights: DecoderWeights,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """`tiles`, `mode` and `fallbacks` are those of `backend`."""
        self._ops, self._fallbacks = backend, fallbacks
        self._tiles, self._mode = tiles, mode
        self._shape, self._weights = shape, weights
        self._cos, self._sin = cos, sin
        self._scale = shape.head_dim**-0.5
        self._is_compiled = interpreting()
        self._sizes = [count * shape.head_dim for count in (shape.num_heads, *(shape.num_kv_heads,) * 2)]

    @property
    def num_borrowed(self) -> int:
        return 0

    def steps_with(self, sampler: FusedSampler) -> None:
        return None

    def __call__(self, batch: StepBatch, pool: Tensor, keep_hidden: bool = True) -> StepResult:
        if not self._is_compiled:
            self.compile_ahead(pool)
        ops, eps = self._ops, self._shape.rms_norm_eps
        residual = functional.embedding(batch.tokens, self._weights.embedding)
        update: Tensor | None = None
        last_layer = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            normed, residual = self._add_norm(update, residual, layer.input_norm)
            attended = self._attention(normed, layer, index, batch, pool)
            if index == last_layer and not keep_hidden:
                attended, residual = attended[batch.logit_rows], residual[batch.logit_rows]
            update = ops.linear(attended, layer.output, layer.output_bias)
            normed, residual = self._add_norm(update, residual, layer.mlp_norm)
            inner = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            update = ops.linear(inner, layer.down, layer.down_bias)
        hidden = residual if update is None else residual + update
        rows = hidden[batch.logit_rows] if keep_hidden else hidden
        last = ops.rms_norm(rows, self._weights.final_norm, eps)
        logits = ops.linear_fp32(last, self._weights.lm_head)
        return StepResult(hidden if keep_hidden else hidden[:0], logits, logits.argmax(dim=-1))

    def compile_ahead(self, pool: Tensor) -> None:
        """What later batches may need of kernels that come in variants."""
        self._is_compiled = True
        tiles, mode, weights = self._tiles, self._mode, self._weights
        dtype, layers = weights.embedding.dtype, weights.layers[:1]
        products = [(weights.lm_head, None, torch.float32)]
        for layer in layers:
            products += [
                (layer.qkv, layer.qkv_bias, dtype),
                (layer.output, layer.output_bias, dtype),
                (layer.gate_up, layer.gate_up_bias, dtype),
                (layer.down, layer.down_bias, dtype),
            ]
        q = weights.embedding.new_empty(0, self._shape.num_heads, self._shape.head_dim)
        why_not = why_not_dtype(q, pool) or why_not_attention(q, pool, tiles, mode, MOST_HEAD_DIM)
        self._fallbacks.run(
            "paged_attention",
            why_not,
            lambda: compile_attention(self._shape, dtype, pool, tiles, mode),
            lambda: None,
        )
        if mode is Mode.EXACT:
            self._fallbacks.run(
                "linear",
                why_not_dtype(weights.embedding),
                lambda: compile_products(products, tiles),
                lambda: None,
            )

    def _add_norm(self, update: Tensor | None, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the new residual, the new residual)."""
        ops, eps = self._ops, self._shape.rms_norm_eps
        if update is None:
            return ops.rms_norm(residual, weight, eps), residual
        added = update

        def apart() -> tuple[Tensor, Tensor]:
            total = residual + added
            return ops.rms_norm(total, weight, eps), total

        why_not = why_not_dtype(residual, added, weight)
        if residual.shape[-1] > MOST_COLUMNS:
            why_not = f"rows of {residual.shape[-1]}"
        return self._fallbacks.run(
            "add_rms_norm", why_not, lambda: rowwise.add_rms_norm(added, residual, weight, eps), apart
        )

    def _attention(
        self, x: Tensor, layer: LayerWeights, index: int, batch: StepBatch, pool: Tensor
    ) -> Tensor:
        ops, shape = self._ops, self._shape
        num_tokens = x.shape[0]
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        q, k, v = (part.view(num_tokens, -1, shape.head_dim) for part in qkv.split(self._sizes, dim=-1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, shape.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, shape.rms_norm_eps)
        q = self._rotate_and_write(q, k, v, batch, pool, index)
        attended = ops.paged_attention(q, pool, index, batch, self._scale)
        return attended.view(num_tokens, self._sizes[0])

    def _rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, pool: Tensor, index: int
    ) -> Tensor:
        ops, cos, sin = self._ops, self._cos, self._sin

        def apart() -> Tensor:
            rotated = ops.rotary(k, batch.positions, cos, sin)
            ops.write_kv(rotated, v.contiguous(), pool, index, batch.slot_mapping)
            return ops.rotary(q, batch.positions, cos, sin)

        if pool.dtype is torch.int8:  # nothing to tell: the keys are quantized by `write_kv`
            return apart()
        why_not = why_not_dtype(q, k, v, pool)
        if q.shape[2] > MOST_HEAD_DIM:
            why_not = f"head_dim {q.shape[2]}"
        return self._fallbacks.run(
            "rotary and KV write",
            why_not,
            lambda: rowwise.rotary_write(q, k, v, batch.positions, cos, sin, pool, index, batch.slot_mapping),
            apart,
        )
