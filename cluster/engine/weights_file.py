"""The weight cache on disk: one flat file, mapped read-only, and a JSON index of what lies where.

Workers of one host that map the same file share its pages; a stray write to a weight is a crash, not a
wrong answer. Tensors start at multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.engine.prepared_model import damaged
from cluster.engine.weight_pages import HugePageWriter, map_file_huge
from cluster.engine.weights_pack import StoredTensor
from cluster.errors import ConfigError

DATA = "weights.bin"
INDEX = "weights.json"
ALIGNMENT = 4096
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8, "uint8": torch.uint8}


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Tensors that live in the mapping; it stays as long as any of them does."""

    tensors: dict[str, Tensor]
    unpacked: frozenset[str]
    num_bytes: int


def write_weights(directory: Path, tensors: Iterable[StoredTensor]) -> str:
    """Write data and index; returns the digest of names, shapes and bytes, hex."""
    digest = hashlib.blake2b(digest_size=16)
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    with (directory / DATA).open("wb", buffering=0) as file, closing(HugePageWriter(file)) as writer:
        for stored in tensors:
            tensor = stored.tensor.detach().cpu().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise TypeError(
                    f"packed weight {stored.name} has type {dtype}, which the cache does not store"
                )
            content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            entries[stored.name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "offset": offset,
                "unpacked": stored.unpacked,
            }
            digest.update(json.dumps([stored.name, dtype, list(tensor.shape)]).encode())
            digest.update(content)
            writer.write(content)
            padding = -content.nbytes % ALIGNMENT
            writer.write(bytes(padding))
            offset += content.nbytes + padding
    (directory / INDEX).write_text(json.dumps({"num_bytes": offset, "tensors": entries}))
    return digest.hexdigest()


def map_weights(directory: Path) -> MappedWeights:
    """Map the file and read it into the page cache; tensors are views, nothing is copied.

    Raises:
        ModelError: the cache is damaged; says what to delete.
    """
    try:
        index = json.loads((directory / INDEX).read_text())
        with (directory / DATA).open("rb") as file:
            size = file.seek(0, 2)
            if size != index["num_bytes"]:
                raise ValueError(f"{DATA} has {size} bytes instead of {index['num_bytes']}")
            data = torch.frombuffer(map_file_huge(file.fileno(), size), dtype=torch.uint8)
        tensors = {name: _view(data, entry) for name, entry in index["tensors"].items()}
        unpacked = frozenset(name for name, entry in index["tensors"].items() if entry["unpacked"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ConfigError) as error:
        raise damaged(directory, error) from error
    return MappedWeights(tensors, unpacked, size)


def _view(data: Tensor, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    num_bytes = math.prod(shape) * dtype.itemsize
    return data.narrow(0, entry["offset"], num_bytes).view(dtype).view(shape)
