"""Tiny random models in every family, saved as checkpoints, and a driver that steps a runner by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from cluster.engine.batch import Row, SampleSpec
from cluster.engine.load import load_decoder
from cluster.engine.packed_batch import pack
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from kernels.ops import Backend, row_size

VOCAB_SIZE = 256
BLOCK_SIZE = 16

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_class(family: str) -> tuple[type[Any], type[Any]]:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    model: Any  # the transformers model, fp32


def make_checkpoint(
    directory: Path, family: str, *, max_shard_size: str = "1GB", **overrides: Any
) -> Checkpoint:
    """Every parameter random, norms and biases included, so that none can be left out unnoticed."""
    config_class, model_class = hf_class(family)
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim" or family != "qwen2"}
    if family == "qwen2":
        sizes["hidden_size"] = 96
    elif family == "llama":
        sizes["hidden_size"] = 96  # a multiple of the heads, as its configuration demands
    model = model_class(config_class(**(sizes | overrides))).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return Checkpoint(directory, model)


def prompts(seed: int = 1, lengths: Sequence[int] = (1, 5, 17, 40, 150)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def transformers_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def same_bits(pool: Tensor, expected: Tensor) -> bool:
    """NaN of blocks that nobody wrote included."""
    return torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


class Engine:
    """A decoder with a pool of its own. Sequences get blocks in the order `block_order` gives."""

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        *,
        num_blocks: int = 96,
        block_seed: int | None = None,
        fuse: bool = True,
        kv_int8: bool = False,
    ) -> None:
        spec = prepared.spec
        self.decoder = load_decoder(prepared, backend, fuse=fuse)
        self.device = backend.device
        dtype = torch.int8 if kv_int8 else TORCH_DTYPES[prepared.dtype]
        size = row_size(spec.head_dim, dtype)
        shape = (num_blocks, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, size)
        # what a block held before must not matter: start from what would show, and spread
        self.pool = torch.full(shape, 127 if kv_int8 else math.nan, dtype=dtype, device=self.device)
        if kv_int8:
            self.pool[..., spec.head_dim :] = torch.tensor([math.nan]).view(torch.int8).to(self.device)
        order = list(range(num_blocks))
        if block_seed is not None:
            order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_seed)).tolist()
        self._free = [BlockId(b) for b in order]
        self._blocks: dict[int, list[BlockId]] = {}

    def row(self, sequence: int, tokens: Sequence[int], start: int) -> Row:
        blocks = self._blocks.setdefault(sequence, [])
        while len(blocks) * BLOCK_SIZE < start + len(tokens):
            blocks.append(self._free.pop(0))
        return Row(
            request=RequestId(str(sequence)),
            attempt=Attempt(1),
            token_ids=tokens,
            start=start,
            block_ids=blocks,
            sample=SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), (), ()),
        )

    def adopt(self, sequence: int, block_ids: Sequence[BlockId]) -> None:
        """`sequence` begins with these blocks, as after a prefix hit."""
        self._blocks[sequence] = list(block_ids)

    def hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """Hidden states per row."""
        with torch.inference_mode():
            batch = pack(rows, BLOCK_SIZE, self.decoder.max_model_len, self.device)
            hidden = self.decoder.forward(batch, self.pool).hidden.clone()
        return list(hidden.split([len(row.token_ids) for row in rows]))

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.decoder.logits(hidden)

    def prefill(self, sequence: int, prompt: Sequence[int], chunk: int | None = None) -> Tensor:
        """Hidden states of the whole prompt, computed in chunks."""
        size = chunk or len(prompt)
        parts = [
            self.hidden([self.row(sequence, prompt[start : start + size], start)])[0]
            for start in range(0, len(prompt), size)
        ]
        return torch.cat(parts)

    def kv(self, sequence: int, num_tokens: int) -> Tensor:
        """[num_tokens, num_layers, 2, kv_heads, row_size] as the pool holds it."""
        blocks = self.pool[self._blocks[sequence]]
        return blocks.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:num_tokens]

    def greedy(self, prompt_list: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """All prompts in one batch: one prefill step, then decode steps."""
        rows = [self.row(i, prompt, 0) for i, prompt in enumerate(prompt_list)]
        outputs: list[list[int]] = [[] for _ in prompt_list]
        for _ in range(num_tokens):
            last = torch.stack([hidden[-1] for hidden in self.hidden(rows)])
            for output, token in zip(outputs, self.logits(last).argmax(dim=-1).tolist(), strict=True):
                output.append(token)
            rows = [
                self.row(i, [output[-1]], len(prompt) + len(output) - 1)
                for i, (prompt, output) in enumerate(zip(prompt_list, outputs, strict=True))
            ]
        return outputs
