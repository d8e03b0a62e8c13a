"""Files that appear whole or not at all, and values that JSON can hold.

Arguments and file names of a command line may be any bytes, so what Python makes of them need not be text.
It is written with U+FFFD in place of what is no character: no name costs a result.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from errno import EINVAL, EISDIR
from io import BufferedWriter
from pathlib import Path
from typing import Any

from cluster.errors import BatonError, ConfigError


def check_output(path: Path) -> None:
    """Make the parents of `path` and try whether a file can be written there. Leaves no file.

    Raises:
        ConfigError: it names no file.
        BatonError: it is a directory, or its directory cannot be made or written.
    """
    _check_name(path)
    temporary = _temporary(path)
    try:
        _open_new(path, temporary).close()
    except OSError as error:
        raise BatonError(_cannot_write(path, error)) from error
    finally:
        _remove(temporary)


def check_output_with_text(path: Path) -> None:
    """`check_output` for a result at `path` and the same as text beside it, with the ending `.txt`.

    Raises:
        BatonError: one of them cannot be written.
        ConfigError: it names no file, or the text would take the result's place.
    """
    _check_name(path)
    beside = path.with_suffix(".txt")
    if beside == path:
        raise ConfigError(f"`{path}` is where the result's text goes; choose another ending, such as .json")
    check_output(path)
    check_output(beside)


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write beside `path`, then rename: a reader sees the old file or the whole new one.

    Raises:
        BatonError: as `check_output`; or the disk is full.
    """
    target = Path(os.path.realpath(path))  # through a link: what it names is replaced, the link stays
    temporary = _temporary(target)
    try:
        with _open_new(target, temporary) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise BatonError(_cannot_write(path, error)) from error
    finally:
        _remove(temporary)


def write_or_rescue(files: Sequence[tuple[Path, Callable[[], Iterable[bytes]]]]) -> None:
    """Write what was measured, file by file. Where that fails, all of it goes to a new temporary directory.

    Raises:
        BatonError: one could not be written where it should; says where it is instead.
    """
    try:
        for path, chunks in files:
            write_atomically(path, chunks())
    except BatonError as error:
        raise BatonError(f"{error}; {_rescue(files)}") from error


def _rescue(files: Sequence[tuple[Path, Callable[[], Iterable[bytes]]]]) -> str:
    """What became of it, in words."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="baton-bench-"))
        for path, chunks in files:
            write_atomically(directory / path.name, chunks())
    except (BatonError, OSError) as error:
        return f"nor could it be kept in a temporary directory ({error})"
    return f"what was measured is in `{directory / files[-1][0].name}` instead"


def json_safe(value: Any) -> Any:
    """The value with string keys, lists for tuples, None for NaN and infinities, strings made text."""
    if isinstance(value, str):
        return as_unicode(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_unicode(str(key)): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def as_unicode(text: str) -> str:
    """U+FFFD for each half of a surrogate pair, which is what a byte that is no UTF-8 becomes."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _check_name(path: Path) -> None:
    if not path.name:  # empty, `.` or `/`
        raise ConfigError(f"Cannot write `{path}`: give the name of a file.")


def _temporary(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _open_new(path: Path, temporary: Path) -> BufferedWriter:
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "it is a directory")
    if path.exists() and not path.is_file():  # renaming over a device or pipe would put a file in its place
        raise OSError(EINVAL, "it is there already, and no ordinary file")
    path.parent.mkdir(parents=True, exist_ok=True)
    return temporary.open("wb")


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):  # renamed away or never made: what went wrong before is what counts
        temporary.unlink()


def _cannot_write(path: Path, error: OSError) -> str:
    return f"Cannot write `{path}`: {error.strerror or error}; choose another place for the result"
