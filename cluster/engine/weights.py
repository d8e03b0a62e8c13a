"""Where weights come from, by their Hugging Face names, and the check that they are the model's.

1. A source (`weights_safetensors`, `gguf_source`) lists names and shapes without reading data.
2. `check_weights` compares the list with what the spec needs: missing, misshapen and left-over tensors
   are errors.
3. `weights_pack` reads tensor by tensor, fuses, converts and packs; `weights_file` stores and maps the
   result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.errors import ModelError
from kernels.coded import CodedMatrix

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class WeightSource(Protocol):
    """One checkpoint, opened. Loading a tensor reads only that tensor."""

    path: str  # for messages
    total_bytes: int  # of all tensors as stored

    def shapes(self) -> Mapping[str, Shape]: ...

    def num_bytes(self, name: str) -> int:
        """As stored in the file."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor in a floating-point type of its own choice (GGUF blocks are dequantized to fp32).

        Raises:
            ModelError: the data cannot be read.
        """
        ...

    def load_coded(self, name: str) -> CodedMatrix | None:
        """The same values as `load` gives, as codes if the file keeps them so."""
        ...


def layer_name(layer: int, part: str) -> str:
    """`(3, "mlp.up_proj.weight")` → the tensor's full name."""
    return f"model.layers.{layer}.{part}"


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor the decoder reads."""
    hidden, inner, query, kv = spec.hidden_size, spec.intermediate_size, spec.query_size, spec.kv_size
    part_shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qkv_bias:
        part_shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", query), ("k", kv), ("v", kv))}
    if spec.output_bias:
        part_shapes["self_attn.o_proj.bias"] = (hidden,)
    if spec.mlp_bias:
        part_shapes |= {
            f"mlp.{p}_proj.bias": (n,) for p, n in (("gate", inner), ("up", inner), ("down", hidden))
        }
    if spec.qk_norm:
        part_shapes |= {f"self_attn.{p}_norm.weight": (spec.head_dim,) for p in ("q", "k")}
    shapes = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    for layer in range(spec.num_layers):
        shapes |= {layer_name(layer, part): shape for part, shape in part_shapes.items()}
    if not spec.tie_word_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, hidden)
    return shapes


def matrix_bytes(spec: ModelSpec, dtype: Dtype) -> int:
    """Of all matrices in the model's type."""
    counts = (shape[0] * shape[1] for shape in expected_shapes(spec).values() if len(shape) == 2)
    return sum(counts) * dtype.num_bytes


def check_weights(source: WeightSource, spec: ModelSpec) -> None:
    """The source holds exactly the model that the spec describes.

    Raises:
        ModelError: a tensor is missing, has another shape, or would be left out of the computation.
    """
    expected, found = expected_shapes(spec), source.shapes()
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{source.path}: tensor `{missing[0]}`{more} is missing")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{source.path}: tensor `{name}` has shape {list(found[name])}, "
                f"the configuration says {list(shape)}"
            )
    for name in found:
        if name not in expected and not _is_redundant(name, spec):
            raise ModelError(
                f"{source.path}: tensor `{name}` is not part of a {spec.architecture.value} model "
                "as its configuration describes it; leaving it out would change the results"
            )


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Frequencies are computed, and a tied head is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and spec.tie_word_embeddings)
