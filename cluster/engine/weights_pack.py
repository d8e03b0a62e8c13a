"""From a checkpoint's tensors to a decoder's weights: fuse, convert, turn, pack, one tensor at a time.

1. Tensors are read in the order a forward pass needs them, stacked and converted to the model's type.
2. Where activations will be int8, the model is turned so that they fit (`cluster.engine.rotation`).
3. Matrices are packed by the backend, those that the file has as codes from these if it can.

`packed_tensors` yields what the weight cache stores; `assemble` turns stored tensors into
`DecoderWeights`. A backend whose packed form is not a tensor gets the plain matrix stored and packs it
when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.rotation import turned_tensors
from cluster.engine.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    TORCH_DTYPES,
    WeightSource,
    layer_name,
    matrix_bytes,
)
from cluster.errors import ModelError
from kernels.coded import stack
from kernels.ops import Backend, DecoderWeights, LayerWeights
from kernels.quantization import Quantization

_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# Codes are for steps of few rows; for all others a model up to this size has its matrices decoded beside
# them. By the model alone, not by this machine's memory: workers of all machines must agree on the layout.
MOST_EXPANDED_BYTES = 2 << 30
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

    parts = _parts(source, spec, dtype, on_read)
    expands = matrix_bytes(spec, dtype) <= MOST_EXPANDED_BYTES
    if backend.quantization is Quantization.INT8:
        turned = turned_tensors(((part.name, part.read()) for part in parts), spec)
        parts = (_Part(name, (), partial(_same, tensor)) for name, tensor in turned)
    embedding: Tensor | None = None  # kept: its address means something only while it is there
    for part in parts:
        name = part.name
        if name.rpartition(".")[2] not in (*_MATRICES, "lm_head"):
            tensor = part.read()
            yield StoredTensor(name, tensor)
            embedding = tensor if name == "embedding" else embedding
            continue
        coded = _pack_coded(part, source, dtype, backend, expands)
        if coded is not None:
            for read in () if name == "lm_head" and spec.tie_word_embeddings else part.sources:
                on_read(source.num_bytes(read))
        stored = coded or _pack(name, part.read(), backend)
        if name != "lm_head" or embedding is None or stored.tensor.data_ptr() != embedding.data_ptr():
            yield stored


@dataclass(frozen=True, slots=True)
class _Part:
    """One of a decoder's tensors, not read yet."""

    name: str
    sources: tuple[str, ...]  # what it is stacked from; none: not from the file as it is
    read: Callable[[], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _pack_coded(
    part: _Part, source: WeightSource, dtype: Dtype, backend: Backend, expands: bool
) -> StoredTensor | None:
    if not backend.coded_layout or dtype is not Dtype.BF16:
        return None
    coded = []
    for name in part.sources:
        one = source.load_coded(name)
        if one is None:
            return None
        coded.append(one)
    matrix = stack(coded) if coded else None
    packed = None if matrix is None else backend.pack_coded(matrix, TORCH_DTYPES[dtype], expands)
    return None if packed is None else StoredTensor(part.name, packed)


def _pack(name: str, weight: Tensor, backend: Backend) -> StoredTensor:
    try:
        packed = backend.pack_linear(weight)
    except ValueError as error:
        raise ModelError(f"{name} cannot be packed: {error}") from error
    if isinstance(packed, Tensor):
        return StoredTensor(name, packed)
    return StoredTensor(name, weight, unpacked=True)


def _parts(
    source: WeightSource, spec: ModelSpec, dtype: Dtype, on_read: Callable[[int], None]
) -> Iterator[_Part]:
    """In the model's type, stacked as `LayerWeights` wants them; a tied head is the embedding itself."""

    def read(*names: str) -> Tensor:
        tensors = []
        for name in names:
            tensors.append(source.load(name).to(TORCH_DTYPES[dtype]))
            on_read(source.num_bytes(name))
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()

    def part(name: str, *names: str) -> _Part:
        return _Part(name, names, lambda: read(*names))

    embedding = read(EMBEDDING)
    yield _Part("embedding", (EMBEDDING,), lambda: embedding)
    for index in range(spec.num_layers):

        def layer(field: str, *names: str, index: int = index) -> _Part:
            return part(f"layers.{index}.{field}", *(layer_name(index, name) for name in names))

        for field, name in _NORMS.items():
            yield layer(field, f"{name}.weight")
        if spec.qk_norm:
            for field, name in _HEAD_NORMS.items():
                yield layer(field, f"{name}.weight")
        for field, names in _MATRICES.items():
            yield layer(field, *(f"{name}.weight" for name in names))
            if _has_bias(spec, field):
                yield layer(f"{field}_bias", *(f"{name}.bias" for name in names))
    yield part("final_norm", FINAL_NORM)
    if spec.tie_word_embeddings:
        yield _Part("lm_head", (EMBEDDING,), lambda: embedding)
    else:
        yield part("lm_head", LM_HEAD)


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
