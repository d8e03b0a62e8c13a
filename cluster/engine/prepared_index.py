"""Whether a model lies converted in the cache, without loading torch: what makes a warm start quick.

`prepare` leaves a note beside the directory it made or found, named after what was asked for (source files,
dtype, backend, quantization). The note is a hint for the launcher, which needs the tokenizer's files early.
Workers decide for themselves what they map: with another packed layout they convert again, whatever a note
says.
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
    model: str, dtype: str, backend: str, root: Path, quantization: str = "none"
) -> Path | None:
    """The prepared directory noted for this model as it is on disk now, if it is still there.

    Raises:
        ModelError: nothing is at `model`, or it is not a model.
    """
    try:
        name = _note(resolve_model(model), dtype, backend, root, quantization).read_text(encoding="utf-8")
    except OSError:
        return None  # never prepared, or by a version that left no note: the slow way finds out
    directory = root / Path(name).name
    return directory if (directory / MANIFEST).is_file() else None


def note_prepared(
    source: ModelSource, dtype: str, backend: str, directory: Path, quantization: str = "none"
) -> None:
    """Leave the note; appears at once, so that no reader sees half of it.

    Raises:
        ModelError: the cache cannot be written.
    """
    note = _note(source, dtype, backend, directory.parent, quantization)
    temporary = note.with_name(f"{note.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(directory.name, encoding="utf-8")
        temporary.rename(note)
    except OSError as error:
        raise ModelError(f"cannot write the weight cache {directory.parent}: {error}") from error


def _note(source: ModelSource, dtype: str, backend: str, root: Path, quantization: str) -> Path:
    facts = json.dumps([FORMAT_VERSION, str(source.path), source.identity(), dtype, backend, quantization])
    return root / f".note-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"
