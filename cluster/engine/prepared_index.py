"""Whether a model lies converted in the cache, without loading torch: what makes a warm start quick.

`prepare` leaves a note beside the directory it made or found, named after what was asked for (source
files, dtype, backend, quantization, and the form of a GGUF file's weights). The note is a hint for the
launcher, which needs the tokenizer's files early. Workers decide for themselves what they map: with another
packed layout they convert again, whatever a note says.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

from cluster.engine.model_source import ModelSource, resolve_model
from cluster.engine.prepared_model import FORMAT_VERSION, MANIFEST
from cluster.errors import ModelError


def find_prepared(
    model: str, dtype: str, backend: str, root: Path, quantization: str = "none", gguf_weights: str = "auto"
) -> Path | None:
    """The prepared directory noted for this model as it is on disk now, if it is still there.

    Raises:
        ModelError: nothing is at `model`, or it is not a model.
    """
    try:
        note = _note(resolve_model(model), dtype, backend, root, quantization, gguf_weights)
        name = note.read_text(encoding="utf-8")
    except OSError:
        return None  # never prepared, or by a version that left no note: the slow way finds out
    directory = root / Path(name).name
    return directory if (directory / MANIFEST).is_file() else None


def note_prepared(
    source: ModelSource,
    dtype: str,
    backend: str,
    directory: Path,
    quantization: str = "none",
    gguf_weights: str = "auto",
) -> None:
    """Leave the note; appears at once, so that no reader sees half of it.

    Raises:
        ModelError: the cache cannot be written.
    """
    note = _note(source, dtype, backend, directory.parent, quantization, gguf_weights)
    temporary = note.with_name(f"{note.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(directory.name, encoding="utf-8")
        temporary.rename(note)
    except OSError as error:
        raise ModelError(f"cannot write the weight cache {directory.parent}: {error}") from error


def _note(
    source: ModelSource, dtype: str, backend: str, root: Path, quantization: str, gguf_weights: str
) -> Path:
    facts = [FORMAT_VERSION, str(source.path), source.identity(), dtype, backend, quantization]
    if source.is_gguf:
        facts.append(gguf_weights)
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8)
    return root / f".note-{digest.hexdigest()}"
