"""Where a run keeps its sockets, its token and Ray's session: one private directory, gone when the run is.

1. `RuntimeDir.create` makes it (mode 0700) and holds a lock in it for as long as the run lives.
2. It first sweeps the directories and shared-memory segments of runs that died without cleaning up: theirs is
   every directory whose lock nobody holds.
3. `close` removes the directory, and every shared-memory segment named after it.

Paths are short: a unix socket's path has 107 bytes, and Ray needs 66 of them for its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError

NAME_PREFIX: Final = "baton-"
MAX_PATH_BYTES: Final = 40
SHM_DIRECTORY: Final = Path("/dev/shm")
_LOCK: Final = "lock"


class RuntimeDir:
    """One run's directory; made by `create` only."""

    def __init__(self, path: Path, lock_descriptor: int, shm_directory: Path) -> None:
        self.path = path
        self._lock_descriptor = lock_descriptor
        self._shm_directory = shm_directory

    @classmethod
    def create(cls, parent: str | None = None, shm_directory: Path = SHM_DIRECTORY) -> RuntimeDir:
        """A new directory below `parent` (default: the system's temporary directory).

        Raises:
            ConfigError: it cannot be made, or its path would be too long for sockets.
        """
        base = Path(parent).expanduser() if parent is not None else _default_parent()
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep(base, shm_directory)
            path = Path(tempfile.mkdtemp(prefix=NAME_PREFIX, dir=base.resolve()))
        except OSError as error:
            raise ConfigError(f"cannot make a runtime directory in {base}: {error.strerror}") from error
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            path.rmdir()
            raise ConfigError(
                f"the runtime directory {path} is longer than {MAX_PATH_BYTES} bytes, too long for sockets "
                f"below it: give a shorter one with --runtime-dir"
            )
        return cls(path, _locked(path / _LOCK), shm_directory)

    def remove_shared_memory(self, prefix: str = "") -> None:
        """Remove segments of this run whose name goes on with `prefix`; who has them mapped keeps them."""
        _remove_segments(self._shm_directory, f"{self.path.name}-{prefix}")

    def close(self) -> None:
        self.remove_shared_memory()
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_descriptor)


def sweep(base: Path, shm_directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove what dead runs of this user left below `base`; returns their names."""
    removed = []
    for path in base.glob(f"{NAME_PREFIX}*"):
        lock = path / _LOCK
        try:
            if path.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:  # not a run's directory, or just being made or removed by another run
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # alive
        else:
            _remove_segments(shm_directory, f"{path.name}-")
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


def _locked(lock: Path) -> int:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_segments(shm_directory: Path, prefix: str) -> None:
    if shm_directory.is_dir():
        for segment in shm_directory.iterdir():
            if segment.name.startswith(prefix):
                segment.unlink(missing_ok=True)


def _default_parent() -> Path:
    directory = Path(tempfile.gettempdir())
    longest = len(os.fsencode(directory)) + len(NAME_PREFIX) + 10
    return directory if longest <= MAX_PATH_BYTES else Path("/tmp")
