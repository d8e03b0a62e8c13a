"""Convert a model once into the weight cache; afterwards a start maps it in milliseconds.

1. `resolve_model` says what the path is; the cache key is the identity of its files, dtype, backend and
   layout, which names the quantization of the matrices.
2. A directory of that key is complete (it appears by rename): open it and be done.
3. Otherwise take the key's lock, so that one process converts while others wait; look again.
4. Open the source, check every tensor against the spec, write tokenizer files, config and packed weights
   into a temporary directory beside the target, and rename it.

`python -m cluster.engine.prepare --model PATH --dtype bf16` does it from the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.engine.backends import NAMES, make_backend, must_compile
from cluster.engine.file_lock import file_lock
from cluster.engine.model_source import ModelSource, resolve_model
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.prepared_index import note_prepared
from cluster.engine.prepared_model import FORMAT_VERSION, MANIFEST, PreparedModel, read_json
from cluster.engine.weights import WeightSource, check_weights
from cluster.engine.weights_file import DATA, write_weights
from cluster.engine.weights_pack import packed_tensors
from cluster.errors import BatonError, ModelError
from cluster.progress import ConversionProgress
from kernels.coded import requested_form
from kernels.ops import NUMERICS, Backend
from kernels.quantization import Quantization

Progress = Callable[[str, int, int], None]  # phase ("": it ended), bytes done, bytes in all (0: not known)

CACHE_VARIABLE = "BATON_CACHE_DIR"
LOCK_TIMEOUT_S = 3600.0
logger = logging.getLogger(__name__)
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def prepare_model(
    model: str | Path,
    dtype: Dtype,
    backend: Backend,
    progress: Progress = lambda phase, done_bytes, total_bytes: None,
    *,
    cache_dir: Path | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> PreparedModel:
    """The model at `model` (a path or `demo`), converted now or found in the cache.

    Raises:
        ModelError: the source is missing, broken or not supported, or the cache cannot be written.
    """
    source = resolve_model(model)
    root = cache_dir or default_cache_dir()
    quantization = backend.quantization.value
    numbers = dtype.value if quantization == "none" else f"{dtype.value}-{quantization}"
    layout = packed_layout(source, dtype, backend)
    target = root / f"{source.name}-{numbers}-{_cache_key(source, dtype, backend.name, layout)}"
    runtime = numeric_runtime(backend)
    try:
        if not (target / MANIFEST).is_file():
            root.mkdir(parents=True, exist_ok=True)
            with file_lock(root / f".{target.name}.lock", lock_timeout_s):
                if not (target / MANIFEST).is_file():
                    _convert(source, dtype, backend, layout, target, progress)
    except TimeoutError as error:
        raise ModelError(
            f"{source.path}: another process has been converting this model for {lock_timeout_s:.0f} s; "
            f"stop it, or remove {root / f'.{target.name}.lock'}"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot write the weight cache {root}: {error}") from error
    prepared = PreparedModel.open(target, runtime)
    form = requested_form(os.environ).value
    note_prepared(source, dtype.value, backend.name, target, quantization, form)
    return prepared


def default_cache_dir() -> Path:
    """`models` below `BATON_CACHE_DIR`, or below ~/.cache/baton."""
    configured = os.environ.get(CACHE_VARIABLE)
    root = Path(configured).expanduser() if configured else Path.home() / ".cache" / "baton"
    return root / "models"


def numeric_runtime(backend: Backend) -> str:
    """Everything beside weights and layout that may change the last bit of a result."""
    if backend.device.type == "cpu":
        unit = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        unit = torch.cuda.get_device_name(backend.device)
    return f"torch {torch.__version__} on {unit}, kernels {NUMERICS}"


def packed_layout(source: ModelSource, dtype: Dtype, backend: Backend) -> str:
    """Of this model's matrices: what a file keeps as codes may be packed as these."""
    keeps_codes = source.is_gguf and dtype is Dtype.BF16
    return backend.packed_layout + (backend.coded_layout if keeps_codes else "")


def _cache_key(source: ModelSource, dtype: Dtype, backend: str, layout: str) -> str:
    identity = [str(source.path), source.identity()]
    facts = [FORMAT_VERSION, identity, dtype.value, backend, layout]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _convert(
    source: ModelSource, dtype: Dtype, backend: Backend, layout: str, target: Path, progress: Progress
) -> None:
    """Under the lock: whatever lies at the temporary name was left by a process that died."""
    temporary = target.parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    temporary.mkdir()
    try:
        progress("reading", 0, 0)
        weights, config = _open(source)
        spec = ModelSpec.from_hf_config(config, weights.path)
        check_weights(weights, spec)
        _write_texts(source, spec, dtype, temporary)
        with torch.inference_mode():
            digest = _write_weights(weights, spec, dtype, backend, temporary, progress)
        manifest = {
            "format_version": FORMAT_VERSION,
            "name": source.name,
            "source": str(source.path),
            "dtype": dtype.value,
            "backend": backend.name,
            "layout": layout,
            "quantization": backend.quantization.value,
            "weights_digest": digest,
        }
        _write_json(temporary / MANIFEST, manifest)
        temporary.rename(target)
        if backend.quantization is not Quantization.NONE:
            stored_bytes = (target / DATA).stat().st_size
            logger.info(
                "%s: matrices quantized to %s, embedding rows and norms in %s: %.0f MB",
                source.name,
                backend.quantization.value,
                dtype.value,
                stored_bytes / 1e6,
            )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open(source: ModelSource) -> tuple[WeightSource, dict[str, Any]]:
    """The weights and the configuration in Hugging Face terms, end-of-sequence ids resolved."""
    if source.is_gguf:
        from cluster.engine.gguf_source import GgufSource  # only a conversion pays for these imports

        gguf_source = GgufSource(source.path)
        return gguf_source, gguf_source.config
    config = read_json(source.path / "config.json")
    generation = source.path / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        config |= {"eos_token_id": eos} if eos is not None else {}
    from cluster.engine.weights_safetensors import SafetensorsSource

    # the architecture is looked at before the weights: the more helpful complaint of the two
    ModelSpec.from_hf_config(config, str(source.path / "config.json"))
    return SafetensorsSource(source.path), config


def _write_texts(source: ModelSource, spec: ModelSpec, dtype: Dtype, directory: Path) -> None:
    _write_json(directory / "config.json", spec.to_hf_config(dtype))
    if source.is_gguf:
        from cluster.tokenizer import export_gguf_tokenizer

        export_gguf_tokenizer(source.path, directory)
    else:
        for name in _COPIED:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, directory / name)
    generation = (
        source.path / "generation_config.json" if not source.is_gguf else directory / "generation_config.json"
    )
    values = read_json(generation) if generation.is_file() else {}
    _write_json(directory / "generation_config.json", values | {"eos_token_id": list(spec.eos_token_ids)})


def _write_weights(
    weights: WeightSource,
    spec: ModelSpec,
    dtype: Dtype,
    backend: Backend,
    directory: Path,
    progress: Progress,
) -> str:
    done_bytes = 0

    def on_read(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if done_bytes < weights.total_bytes:  # the end is told once, when everything is written
            progress("converting", done_bytes, weights.total_bytes)

    progress("converting", 0, weights.total_bytes)
    digest = write_weights(directory, packed_tensors(weights, spec, dtype, backend, on_read))
    progress("converting", weights.total_bytes, weights.total_bytes)
    return digest


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class _Notices(logging.Handler):
    """Warnings as notices: nobody reads the standard error of this process while all goes well."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(notice=record.getMessage())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints the prepared directory, or one sentence and status 1.

    With `--json`, standard output has one object per line: `{"phase", "done_bytes", "total_bytes"}` while it
    works, `{"notice"}` for what is logged as a warning, at the end `{"directory"}` or `{"error"}`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cluster.engine.prepare", description="Convert a model once."
    )
    parser.add_argument("--model", required=True, help="directory, .gguf file or `demo`")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default=Dtype.BF16.value)
    parser.add_argument(
        "--quantization", choices=[kind.value for kind in Quantization], default=Quantization.NONE.value
    )
    parser.add_argument("--backend", choices=NAMES, default=NAMES[0])
    parser.add_argument("--threads", type=int, default=1, help="compute threads for packing")
    parser.add_argument("--json", action="store_true", help="machine-readable lines on standard output")
    options = parser.parse_args(arguments)

    def tell(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    def prepare(progress: Progress) -> PreparedModel:
        torch.set_num_threads(options.threads)
        if must_compile(options.backend):
            progress("compiling the kernels", 0, 0)
            backend = make_backend(options.backend, options.threads, options.quantization)
            progress("", 0, 0)
        else:
            backend = make_backend(options.backend, options.threads, options.quantization)
        return prepare_model(options.model, Dtype(options.dtype), backend, progress)

    notices = _Notices(tell)
    try:
        if options.json:
            logging.getLogger().addHandler(notices)
            prepared = prepare(
                lambda phase, done, total: tell(phase=phase, done_bytes=done, total_bytes=total)
            )
            tell(directory=str(prepared.directory))
        else:
            with ConversionProgress() as display:
                prepared = prepare(display.report)
            print(prepared.directory)
    except BatonError as error:
        if options.json:
            tell(error=str(error))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        logging.getLogger().removeHandler(notices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
