"""Turns a model so that no channel of its activations stands out: what int8 rows need.

A few channels of a trained residual stream are many times as large as the rest, and a row that shares one
scale spends its 255 levels on them. An orthogonal matrix Q spreads them over all channels, and a decoder of
RMS norms does not notice: the norm of h·Q is that of h, so Q is folded into the matrices before and after.

1. Norm weights are folded into the matrices that read them, and become ones.
2. Whatever writes the stream (embedding, output, down) writes h·Q; whatever reads it (qkv, gate_up, lm_head)
   undoes that: (W·diag(norm)·Q) (h·Q)ᵀ = W·diag(norm) hᵀ.
3. Within each head the values are turned likewise, between the v rows of qkv and the columns of output.

Nothing is computed at run time. The idea is that of QuaRot (Ashkboos et al. 2024), without its online part.
Q is a Kronecker product of Hadamard matrices and, for the odd part of a size, a cosine transform: quick to
apply, and the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.model_spec import ModelSpec

_LARGEST_FACTOR = 64  # a Hadamard factor at most: applied as a small matrix product
_ROWS = 4096


def factors(size: int) -> list[Tensor]:
    """Orthogonal fp64 matrices whose Kronecker product is of `size`."""
    powers = size & -size
    odd = size // powers
    found = [_cosine(odd)] if odd > 1 else []
    while powers > 1:
        order = min(powers, _LARGEST_FACTOR)
        found.append(_hadamard(order))
        powers //= order
    return found


def turned_rows(x: Tensor) -> Tensor:
    """As `turned` along the last dimension, in parts: fp64 copies of a vocabulary are large."""
    return torch.cat([turned(part) for part in x.split(_ROWS)])


def turned(x: Tensor, dim: int = -1) -> Tensor:
    """x·Q along one dimension, fp32: each vector of that dimension is turned, lengths stay."""
    moved = x.double().movedim(dim, -1)
    matrices = factors(moved.shape[-1])
    result = moved.reshape(*moved.shape[:-1], *(matrix.shape[0] for matrix in matrices))
    for axis, matrix in enumerate(matrices, start=moved.dim() - 1):
        result = (result.movedim(axis, -1) @ matrix).movedim(-1, axis)
    return result.reshape(moved.shape).movedim(-1, dim).float().contiguous()


def turned_tensors(tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """A decoder's plain tensors, norms before the matrices that read them (the order of `weights_pack`),
    turned. Matrices come out in fp32, everything else in the type it had."""
    turning = Turning(spec.query_size, spec.kv_size, spec.head_dim)
    norms: dict[tuple[str, str], Tensor] = {}
    for name, tensor in tensors:
        layer, _, field = name.rpartition(".")
        match field:
            case "input_norm" | "mlp_norm" | "final_norm":
                norms[layer, field] = tensor
                yield name, torch.ones_like(tensor)
            case "embedding":
                yield name, turned_rows(tensor).to(tensor.dtype)
            case "qkv":
                yield name, turning.qkv(tensor, norms[layer, "input_norm"])
            case "qkv_bias":
                yield name, turning.value_rows(tensor).to(tensor.dtype)
            case "output":
                yield name, turning.output(tensor)
            case "gate_up":
                yield name, turning.reader(tensor, norms[layer, "mlp_norm"])
            case "down":
                yield name, turning.writer(tensor)
            case "output_bias" | "down_bias":
                yield name, turning.writer(tensor).to(tensor.dtype)
            case "lm_head":
                yield name, turning.reader(tensor, norms[layer, "final_norm"])
            case "q_norm" | "k_norm" | "gate_up_bias":
                yield name, tensor
            case _:
                raise ValueError(f"a tensor that cannot be turned: {name}")


@dataclass(frozen=True, slots=True)
class Turning:
    """Applies steps 1 to 3 to one matrix at a time; results in fp32."""

    query_size: int
    kv_size: int
    head_dim: int

    def reader(self, weight: Tensor, norm: Tensor) -> Tensor:
        """weight [out, hidden], norm [hidden]: gate_up and lm_head."""
        return turned_rows(weight.float() * norm.float())

    def qkv(self, weight: Tensor, norm: Tensor) -> Tensor:
        return self.value_rows(self.reader(weight, norm))

    def value_rows(self, qkv: Tensor) -> Tensor:
        """The v rows of a qkv weight [out, hidden] or bias [out]."""
        first_value = self.query_size + self.kv_size
        values = qkv[first_value:].unflatten(0, (-1, self.head_dim))
        return torch.cat([qkv[:first_value].float(), turned(values, 1).flatten(0, 1)])

    def output(self, weight: Tensor) -> Tensor:
        """weight [hidden, query heads · head_dim]."""
        return self.writer(turned(weight.unflatten(1, (-1, self.head_dim))).flatten(1))

    def writer(self, weight: Tensor) -> Tensor:
        """weight [hidden, in] or bias [hidden]: down, and what output adds to the stream."""
        return turned(weight, 0)


def _hadamard(order: int) -> Tensor:
    """Sylvester's construction; `order` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(order)


def _cosine(order: int) -> Tensor:
    """The orthonormal discrete cosine transform (DCT-II)."""
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(math.pi / order * (index[None] + 0.5) * index[:, None]) * math.sqrt(2 / order)
    matrix[0] /= math.sqrt(2)
    return matrix
