"""The decoder: one definition for every supported family, driven by `ModelSpec`, made of `kernels.ops`.

`forward` is a step: it takes the backend's own pass over the whole model where it has one
(`Backend.fuse`), and otherwise, with the same bits, the operations one by one:

1. `hidden`: token ids → embedding rows → for each layer attention and gated MLP, each added to the
   residual. The keys and values of the batch's tokens are written to the paged pool before attention
   reads them.
2. `logits`: chosen rows of the hidden states → final norm → vocabulary, in fp32.

Every operation is row-wise or row-invariant, so a token's bits do not depend on the tokens computed
beside it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cluster.engine.model_spec import ModelSpec
from cluster.engine.packed_batch import PackedBatch
from cluster.engine.parallel import SINGLE_RANK, ParallelConfig
from cluster.engine.rotary import rotary_tables
from kernels.ops import Backend, DecoderShape, DecoderWeights, FusedForward, LayerWeights, StepResult


class Decoder:
    """One model on one device. Immutable after construction; the KV pool is the caller's."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        backend: Backend,
        max_model_len: int,
        parallel: ParallelConfig = SINGLE_RANK,
        fuse: bool = True,
    ) -> None:
        """`fuse` False: the operations one by one, for tests that hold the backend's own pass to them."""
        self.spec = spec
        self.parallel = parallel
        self.max_model_len = max_model_len
        self._weights = weights
        self._ops = backend
        self._scale = spec.head_dim**-0.5
        cos, sin = rotary_tables(spec.rope, spec.head_dim, max_model_len)
        self._cos, self._sin = cos.to(backend.device), sin.to(backend.device)
        shape = DecoderShape(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
        )
        self._fused = backend.fuse(shape, weights, self._cos, self._sin) if fuse else None

    @property
    def fused(self) -> FusedForward | None:
        """The backend's own pass, if it has one and is used."""
        return self._fused

    def forward(self, batch: PackedBatch, pool: Tensor, keep_hidden: bool = True) -> StepResult:
        """Compute a step: keys and values of the batch's tokens to `pool`, logits of its `logit_rows`.
        Without `keep_hidden` other rows end with the last layer's keys and values.

        The result's tensors may be overwritten by the next step.
        """
        if self._fused is not None:
            return self._fused(batch, pool, keep_hidden)
        hidden = self.hidden(batch, pool)
        logits = self.logits(hidden[batch.logit_rows])
        return StepResult(hidden if keep_hidden else hidden[:0], logits, logits.argmax(dim=-1))

    def hidden(self, batch: PackedBatch, pool: Tensor) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last layer, before the final norm.

        Writes keys and values of the batch's tokens to `pool`, laid out as `kernels.ops` says.
        """
        x = functional.embedding(batch.tokens, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(x, layer, index, batch, pool)
            x = x + self._mlp(x, layer)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → fp32 [num_rows, vocab_size]."""
        normed = self._ops.rms_norm(hidden, self._weights.final_norm, self.spec.rms_norm_eps)
        return self._ops.linear_fp32(normed, self._weights.lm_head)

    def _attention(
        self, x: Tensor, layer: LayerWeights, index: int, batch: PackedBatch, pool: Tensor
    ) -> Tensor:
        ops, spec = self._ops, self.spec
        normed = ops.rms_norm(x, layer.input_norm, spec.rms_norm_eps)
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
        q, k, v = (
            part.contiguous().view(x.shape[0], -1, spec.head_dim)
            for part in qkv.split((spec.query_size, spec.kv_size, spec.kv_size), dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        q = ops.rotary(q, batch.positions, self._cos, self._sin)
        k = ops.rotary(k, batch.positions, self._cos, self._sin)
        ops.write_kv(k, v, pool, index, batch.slot_mapping)
        attended = ops.paged_attention(q, pool, index, batch, self._scale)
        return ops.linear(attended.view(x.shape[0], spec.query_size), layer.output, layer.output_bias)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        ops = self._ops
        normed = ops.rms_norm(x, layer.mlp_norm, self.spec.rms_norm_eps)
        inner = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
        return ops.linear(inner, layer.down, layer.down_bias)
