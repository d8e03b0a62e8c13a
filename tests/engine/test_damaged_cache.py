"""A weight cache that is not as it was written: one sentence says what to do, whatever part is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from cluster.engine.load import load_decoder
from cluster.engine.prepared_model import MANIFEST
from cluster.engine.weights_file import DATA, INDEX, map_weights
from cluster.errors import ModelError
from kernels.cpu.backend import CpuBackend


def without_a_tensor(index: str) -> str:
    entries = json.loads(index)
    del entries["tensors"]["final_norm"]
    return json.dumps(entries)


def with_a_tensor_of_another(index: str) -> str:
    entries = json.loads(index)
    entries["tensors"]["layers.0.down"] = entries["tensors"]["layers.0.qkv"]
    return json.dumps(entries)


DAMAGES: dict[str, tuple[str, Callable[[str], str]]] = {
    "empty index": (INDEX, lambda text: ""),
    "cut index": (INDEX, lambda text: text[: len(text) // 2]),
    "index without tensors": (INDEX, lambda text: json.dumps({"num_bytes": json.loads(text)["num_bytes"]})),
    "index without a tensor": (INDEX, without_a_tensor),
    "index of another model": (INDEX, with_a_tensor_of_another),
    "cut manifest": (MANIFEST, lambda text: text[: len(text) // 2]),
    "empty manifest": (MANIFEST, lambda text: "{}"),
    "manifest without a name": (MANIFEST, lambda text: text.replace('"name"', '"title"')),
    "manifest of an unknown type": (MANIFEST, lambda text: text.replace('"fp32"', '"fp31"')),
    "cut configuration": ("config.json", lambda text: text[: len(text) // 2]),
    "configuration of another model": (
        "config.json",
        lambda text: text.replace('"intermediate_size": 96', '"intermediate_size": 97'),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_reported(damage: str, checkpoint: Any, prepare: Any) -> None:
    directory, backend = checkpoint("llama").directory, CpuBackend(1)
    name, change = DAMAGES[damage]
    file = prepare(directory, backend=backend).directory / name
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))
    with pytest.raises(ModelError, match=r"damaged weight cache .* delete the directory and start again"):
        load_decoder(prepare(directory, backend=backend), backend)


@pytest.mark.parametrize("num_bytes", [-1, 1, None])
def test_weights_cut_short_are_reported(num_bytes: int | None, checkpoint: Any, prepare: Any) -> None:
    prepared = prepare(checkpoint("llama").directory)
    data = prepared.directory / DATA
    os.truncate(data, 0 if num_bytes is None else data.stat().st_size + num_bytes)
    with pytest.raises(ModelError, match=r"damaged weight cache .* delete the directory"):
        map_weights(prepared.directory)
