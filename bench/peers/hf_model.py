"""The model every peer serves: Baton's source, written once as a bf16 Hugging Face directory.

1. `resolve_model` finds the source (for `demo` a Q4_1 GGUF file).
2. Every tensor is dequantized, rounded to bf16 and written to `model.safetensors`, beside `config.json`,
   tokenizer files and `generation_config.json`.
3. The directory appears by rename, so it is whole or not there.

`python -m bench.peers.hf_model --model demo --out DIR` runs in Baton's own environment. Peers that read the
directory therefore hold the same bits as Baton's bf16 weights; peers that read the GGUF hold Q4_1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.engine.gguf_source import GgufSource
from cluster.engine.model_source import resolve_model
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.errors import BatonError
from cluster.tokenizer import export_gguf_tokenizer

_COPIED = ("*.safetensors", "*.json", "*.jinja", "*.txt")


def write_hf_directory(model: str, out: Path) -> None:
    """Write the model at `model` (a path or `demo`) to the directory `out`, unless it is there.

    Raises:
        ModelError: the source is missing, broken or not supported.
    """
    if (out / "config.json").is_file():
        return
    source = resolve_model(model)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if source.is_gguf:
            _convert(source.path, temporary)
        else:
            for pattern in _COPIED:
                for file in source.path.glob(pattern):
                    shutil.copyfile(file, temporary / file.name)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(gguf_file: Path, directory: Path) -> None:
    weights = GgufSource(gguf_file)
    spec = ModelSpec.from_hf_config(weights.config, weights.path)
    tensors = {name: weights.load(name).to(torch.bfloat16) for name in weights.shapes()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    export_gguf_tokenizer(gguf_file, directory)
    generation = directory / "generation_config.json"
    values = json.loads(generation.read_text()) if generation.is_file() else {}
    for name, value in (
        ("generation_config.json", values | {"eos_token_id": list(spec.eos_token_ids)}),
        ("config.json", spec.to_hf_config(Dtype.BF16)),
    ):
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.hf_model", description="Write the model once."
    )
    parser.add_argument("--model", required=True, help="directory, .gguf file or `demo`")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(arguments)
    try:
        write_hf_directory(options.model, options.out)
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"directory": str(options.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
