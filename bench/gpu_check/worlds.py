"""Random inputs for the checks: sequences in a paged pool, and models of named shapes made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.engine.decoder import Decoder
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from kernels.ops import Backend, DecoderWeights, LayerWeights

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "tiny, group 4": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 96, "rope_theta": 10000.0,
    },
    "tiny, group 3, norms of heads": {
        "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


def spec_of(name: str) -> ModelSpec:
    config = {
        **(SHAPES | TINY)[name], "max_position_embeddings": 40960, "rms_norm_eps": 1e-5, "eos_token_id": 2,
        "hidden_act": "silu",
    }  # fmt: skip
    return ModelSpec.from_hf_config(config, name)


def random_weights(spec: ModelSpec, dtype: torch.dtype, backend: Backend) -> DecoderWeights:
    """Normal values that keep activations near 1; norms near 1, biases where the model has them."""
    device = backend.device
    generator = torch.Generator(device).manual_seed(5)

    def plain(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        return made.mul_(shape[-1] ** -0.5)

    def norm(size: int) -> Tensor:
        return plain(size) * 0.1 + 1.0

    def matrix(rows: int, columns: int) -> Any:
        return backend.pack_linear(plain(rows, columns))

    def layer() -> LayerWeights:
        hidden, inner, qkv = spec.hidden_size, spec.intermediate_size, spec.query_size + 2 * spec.kv_size
        return LayerWeights(
            input_norm=norm(hidden),
            qkv=matrix(qkv, hidden),
            qkv_bias=plain(qkv) if spec.qkv_bias else None,
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            output=matrix(hidden, spec.query_size),
            output_bias=None,
            mlp_norm=norm(hidden),
            gate_up=matrix(2 * inner, hidden),
            gate_up_bias=None,
            down=matrix(hidden, inner),
            down_bias=None,
        )

    embedding = plain(spec.vocab_size, spec.hidden_size) * spec.hidden_size**0.5
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(spec.num_layers)),
        final_norm=norm(spec.hidden_size),
        lm_head=backend.pack_linear(embedding)
        if spec.tie_word_embeddings
        else matrix(spec.vocab_size, spec.hidden_size),
    )


def make_pool(name: str, dtype: Dtype, device: torch.device, num_blocks: int, block_size: int) -> Tensor:
    spec = spec_of(name)
    shape = (num_blocks, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim)
    return torch.full(shape, 0.01, dtype=TORCH_DTYPES[dtype], device=device)


def make_runner(
    name: str,
    weights: DecoderWeights,
    dtype: Dtype,
    backend: Backend,
    pool: Tensor,
    max_len: int,
    fuse: bool = True,
) -> ModelRunner:
    """The engine's runner over a model that is on the device already."""
    spec = spec_of(name)
    with torch.inference_mode():
        decoder = Decoder(spec, weights, backend, max_len, fuse=fuse)
    prepared = PreparedModel(Path(), name, spec, dtype, "none", "", spec.eos_token_ids)
    return ModelRunner(prepared, pool, backend, max_len, decoder=decoder)


@dataclass(slots=True)
class Meta:
    """`kernels.ops.AttentionMeta`; made once, then only read."""

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


class Paged:
    """Sequences of given lengths, scattered over a pool that holds NaN elsewhere."""

    def __init__(
        self, lengths: Sequence[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype,
        device: torch.device, block_size: int = 64,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator)
        self.lengths, self.block_size, self.device = list(lengths), block_size, device
        self.scale = head_dim**-0.5
        shape = (len(order), 1, 2, block_size, heads[1], head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.queries, self.tables = [], []
        for length, count in zip(lengths, counts, strict=True):
            blocks, order = order[:count].to(device), order[count:]
            kv = torch.randn(2, length, heads[1], head_dim, device=device).to(dtype)
            positions = torch.arange(length, device=device)
            for which in range(2):
                self.pool[blocks[positions // block_size], 0, which, positions % block_size] = kv[which]
            self.queries.append(torch.randn(length, heads[0], head_dim, device=device).to(dtype))
            self.tables.append(blocks.int())

    def meta(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Meta]:
        """Queries and batch of spans (sequence, start, stop)."""
        lengths = [stop - start for _, start, stop in spans]
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        contexts = torch.tensor([stop for _, _, stop in spans], dtype=torch.int32, device=self.device)
        width = max(len(table) for table in self.tables)
        tables = torch.full((len(spans), width), 2**31 - 1, dtype=torch.int32, device=self.device)
        for row, (sequence, _, stop) in enumerate(spans):
            needed = -(-stop // self.block_size)
            tables[row, :needed] = self.tables[sequence][:needed]
        q = torch.cat([self.queries[sequence][start:stop] for sequence, start, stop in spans])
        return q, Meta(starts, contexts, tables, torch.empty(0, dtype=torch.int64, device=self.device))

    def attend(self, backend: Backend, spans: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        q, meta = self.meta(spans)
        out = backend.paged_attention(q, self.pool, 0, meta, self.scale)
        return list(out.split([stop - start for _, start, stop in spans]))
