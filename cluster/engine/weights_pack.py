"""From a checkpoint's tensors to a decoder's weights: fuse, convert, turn, pack, one tensor at a time.

1. Tensors are read in the order a forward pass needs them, stacked and converted to the model's type.
2. Where activations will be int8, the model is turned so that they fit (`cluster.engine.rotation`).
3. Matrices are packed by the backend.

`packed_tensors` yields what the weight cache stores; `assemble` turns stored tensors into
`DecoderWeights`. A backend whose packed form is not a tensor gets the plain matrix stored and packs it
when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.rotation import turned_tensors
from cluster.engine.weights import EMBEDDING, FINAL_NORM, LM_HEAD, TORCH_DTYPES, WeightSource, layer_name
from cluster.errors import ModelError
from kernels.ops import Backend, DecoderWeights, LayerWeights
from kernels.quantization import Quantization

_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the weight cache. `unpacked`: a plain matrix that the backend packs on loading."""

    name: str
    tensor: Tensor
    unpacked: bool = False


def packed_tensors(
    source: WeightSource,
    spec: ModelSpec,
    dtype: Dtype,
    backend: Backend,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[StoredTensor]:
    """Every tensor of a decoder, in the order a forward pass reads them; `on_read` hears the bytes taken
    from the source. A tied head that `pack_linear` makes from the embedding without a copy is left out.

    Raises:
        ModelError: the source's data cannot be read, or the backend cannot pack it.
    """

    tensors = _plain_tensors(source, spec, dtype, on_read)
    if backend.quantization is Quantization.INT8:
        tensors = turned_tensors(tensors, spec)
    embedding: Tensor | None = None  # kept: its address means something only while it is there
    for name, tensor in tensors:
        if name == "embedding":
            embedding = tensor
        if name.rpartition(".")[2] in (*_MATRICES, "lm_head"):
            stored = _pack(name, tensor, backend)
        else:
            stored = StoredTensor(name, tensor)
        if name != "lm_head" or embedding is None or stored.tensor.data_ptr() != embedding.data_ptr():
            yield stored


def _pack(name: str, weight: Tensor, backend: Backend) -> StoredTensor:
    try:
        packed = backend.pack_linear(weight)
    except ValueError as error:
        raise ModelError(f"{name} cannot be packed: {error}") from error
    if isinstance(packed, Tensor):
        return StoredTensor(name, packed)
    return StoredTensor(name, weight, unpacked=True)


def _plain_tensors(
    source: WeightSource, spec: ModelSpec, dtype: Dtype, on_read: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """In the model's type, stacked as `LayerWeights` wants them; a tied head is the embedding itself."""

    def read(*names: str) -> Tensor:
        parts = []
        for name in names:
            parts.append(source.load(name).to(TORCH_DTYPES[dtype]))
            on_read(source.num_bytes(name))
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    embedding = read(EMBEDDING)
    yield "embedding", embedding
    for index in range(spec.num_layers):

        def layer(part: str, index: int = index) -> str:
            return layer_name(index, part)

        for field, part in _NORMS.items():
            yield f"layers.{index}.{field}", read(layer(f"{part}.weight"))
        if spec.qk_norm:
            for field, part in _HEAD_NORMS.items():
                yield f"layers.{index}.{field}", read(layer(f"{part}.weight"))
        for field, parts in _MATRICES.items():
            yield f"layers.{index}.{field}", read(*(layer(f"{part}.weight") for part in parts))
            if _has_bias(spec, field):
                yield f"layers.{index}.{field}_bias", read(*(layer(f"{part}.bias") for part in parts))
    yield "final_norm", read(FINAL_NORM)
    yield "lm_head", embedding if spec.tie_word_embeddings else read(LM_HEAD)


def assemble(
    spec: ModelSpec, tensors: Mapping[str, Tensor], unpacked: frozenset[str], backend: Backend
) -> DecoderWeights:
    """`tensors` by the names of `packed_tensors`, perhaps mapped from a file: nothing is copied on a
    CPU."""

    def plain(name: str) -> Tensor:
        return tensors[name].to(backend.device)

    def optional(name: str) -> Tensor | None:
        return plain(name) if name in tensors else None

    def matrix(name: str) -> Any:
        return backend.pack_linear(plain(name)) if name in unpacked else plain(name)

    def layer(index: int) -> LayerWeights:
        prefix = f"layers.{index}."
        return LayerWeights(
            input_norm=plain(prefix + "input_norm"),
            qkv=matrix(prefix + "qkv"),
            qkv_bias=optional(prefix + "qkv_bias"),
            q_norm=optional(prefix + "q_norm"),
            k_norm=optional(prefix + "k_norm"),
            output=matrix(prefix + "output"),
            output_bias=optional(prefix + "output_bias"),
            mlp_norm=plain(prefix + "mlp_norm"),
            gate_up=matrix(prefix + "gate_up"),
            gate_up_bias=optional(prefix + "gate_up_bias"),
            down=matrix(prefix + "down"),
            down_bias=optional(prefix + "down_bias"),
        )

    embedding = plain("embedding")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(spec.num_layers)),
        final_norm=plain("final_norm"),
        # a tied head is stored only where its packed form is not the embedding's own memory
        lm_head=matrix("lm_head") if "lm_head" in tensors else backend.pack_linear(embedding),
    )


def _has_bias(spec: ModelSpec, field: str) -> bool:
    return {"qkv": spec.qkv_bias, "output": spec.output_bias}.get(field, spec.mlp_bias)
