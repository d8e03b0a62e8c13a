"""Weights from a directory of safetensors: one file, or shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.engine.weights import Shape
from cluster.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsSource:
    """A checkpoint of one or more safetensors files; see `WeightSource`."""

    def __init__(self, directory: Path) -> None:
        """Read the headers.

        Raises:
            ModelError: no weights here, a shard is missing, or a file is not readable safetensors.
        """
        self.path = str(directory)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._num_bytes: dict[str, int] = {}
        for file in weight_files(directory):
            self._read_header(file)
        self.total_bytes = sum(self._num_bytes.values())

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    piece = tensors.get_slice(name)
                    if name in self._files:
                        raise ModelError(f"{file}: tensor `{name}` is also in {self._files[name].name}")
                    if piece.get_dtype() not in _ITEM_BYTES:
                        raise ModelError(
                            f"{file}: tensor `{name}` has type {piece.get_dtype()}, which is not supported"
                        )
                    shape = tuple(piece.get_shape())
                    self._files[name] = file
                    self._shapes[name] = shape
                    self._num_bytes[name] = math.prod(shape) * _ITEM_BYTES[piece.get_dtype()]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: not a readable safetensors file: {error}") from error

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def num_bytes(self, name: str) -> int:
        return self._num_bytes[name]

    def load(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                tensor = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor `{name}` cannot be read: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def load_coded(self, name: str) -> None:
        return None


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, in a stable order.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        return _sharded(index)
    if single.is_file():
        return [single]
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ModelError(f"{directory}: {len(others)} safetensors files without {INDEX}")
    raise ModelError(f"{directory}: has a config.json but no safetensors weights")


def _sharded(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {error!r}") from error
    files = [index.parent / name for name in names]
    for file in files:
        if file.parent != index.parent:
            raise ModelError(f"{index}: names a shard outside its directory: `{file.name}`")
        if not file.is_file():
            raise ModelError(f"{index}: shard `{file.name}` is missing")
    return files
