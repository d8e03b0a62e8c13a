"""A converted model in the weight cache, as a value. Reads JSON only, no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.errors import ModelError

FORMAT_VERSION = 5  # of the cache directory; a change makes every model convert again
MANIFEST = "baton.json"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """`directory` holds config.json, generation_config.json, the tokenizer's files and the packed weights.

    Equal fingerprints give equal bits: it covers the weights' content, the spec, dtype, backend, packed
    layout (which names the quantization), and the numeric runtime (torch version, instruction set, and the
    kernels' `NUMERICS`).
    """

    directory: Path
    name: str
    spec: ModelSpec
    dtype: Dtype
    quantization: str  # of the matrices: "none", "int8", ...
    fingerprint: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def open(cls, directory: Path, runtime: str) -> PreparedModel:
        """`runtime` names what else decides the bits of a result (see `prepare.numeric_runtime`).

        Raises:
            ModelError: not a prepared model, one of another format version, or a damaged one.
        """
        try:
            return cls._read(directory, runtime)
        except (ModelError, KeyError, TypeError, ValueError) as error:
            raise damaged(directory, error) from error

    @classmethod
    def _read(cls, directory: Path, runtime: str) -> PreparedModel:
        manifest = read_json(directory / MANIFEST)
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ModelError(
                f"{directory}: weight cache of format {manifest.get('format_version')}, not {FORMAT_VERSION}"
            )
        config = read_json(directory / "config.json")
        spec = ModelSpec.from_hf_config(config, str(directory / "config.json"))
        identity = [
            manifest[key]
            for key in ("format_version", "weights_digest", "dtype", "quantization", "backend", "layout")
        ]
        facts = json.dumps([*identity, runtime, config], sort_keys=True)
        return cls(
            directory=directory,
            name=manifest["name"],
            spec=spec,
            dtype=Dtype(manifest["dtype"]),
            quantization=manifest["quantization"],
            fingerprint=hashlib.blake2b(facts.encode(), digest_size=16).hexdigest(),
            eos_token_ids=spec.eos_token_ids,
        )


def damaged(directory: Path, error: Exception) -> ModelError:
    """What to say of a weight cache that is not as it was written."""
    what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return ModelError(f"{directory}: damaged weight cache ({what}); delete the directory and start again")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file is missing or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
