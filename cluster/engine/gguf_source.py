"""Weights and configuration from a GGUF file: blocks dequantized to fp32, heads put back in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from cluster.engine.gguf_codes import take_apart
from cluster.engine.gguf_config import ROPE_FACTORS, hf_config, hf_tensor_name, interleaved_heads
from cluster.engine.gguf_reader import GgufReader
from cluster.engine.weights import EMBEDDING, Shape
from cluster.errors import ModelError
from kernels.coded import CodedMatrix


class GgufSource:
    """One opened GGUF file; see `WeightSource`. Tensor names are Hugging Face names."""

    def __init__(self, file: Path) -> None:
        """Read header and metadata.

        Raises:
            ModelError: the file is not GGUF, is truncated, or its metadata describes no supported model.
        """
        self.path = str(file)
        try:
            reader = GgufReader(file)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ModelError(f"{file}: not a readable GGUF file, perhaps truncated: {error}") from error
        self._metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {hf_tensor_name(t.name): t for t in reader.tensors if t.name != ROPE_FACTORS}
        self._shapes: dict[str, Shape] = {
            name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()
        }
        self.total_bytes = sum(int(t.n_bytes) for t in self._tensors.values())
        factors = next((t for t in reader.tensors if t.name == ROPE_FACTORS), None)
        if EMBEDDING not in self._tensors:
            raise ModelError(f"{file}: tensor `token_embd.weight` is missing")
        self.config = hf_config(
            self._metadata,
            vocab_size=self._shapes[EMBEDDING][0],
            tensor_names=tuple(self._tensors),
            rope_factors=None if factors is None else factors.data.tolist(),
            source=self.path,
        )

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def num_bytes(self, name: str) -> int:
        return int(self._tensors[name].n_bytes)

    def load(self, name: str) -> Tensor:
        stored = self._tensors[name]
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self.path}: tensor `{stored.name}` of type {stored.tensor_type.name} "
                f"cannot be dequantized: {error}"
            ) from error
        values = np.array(values, dtype=np.float32, order="C").reshape(self._shapes[name])
        if stored.tensor_type is gguf.GGMLQuantizationType.Q4_0:
            values += 0.0  # no -0, so that its bits are those of code · scale + minimum (`gguf_codes`)
        return self._ordered(name, torch.from_numpy(values))

    def load_coded(self, name: str) -> CodedMatrix | None:
        stored = self._tensors[name]
        coded = take_apart(np.asarray(stored.data), stored.tensor_type)
        if coded is None:
            return None
        minima = None if coded.minima is None else self._ordered(name, coded.minima)
        return CodedMatrix(self._ordered(name, coded.codes), self._ordered(name, coded.scales), minima)

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Rows as Hugging Face has them, whatever is in them."""
        interleaved = interleaved_heads(str(self._metadata["general.architecture"]), name)
        if interleaved is None:
            return rows
        heads = "num_attention_heads" if interleaved == "query" else "num_key_value_heads"
        return _separate_halves(rows, int(self.config[heads]))


def _separate_halves(rows: Tensor, num_heads: int) -> Tensor:
    """[num_heads · head_dim, ...]: rows (x0, y0, x1, y1, ...) of each head → (x0, x1, ..., y0, y1, ...)."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
