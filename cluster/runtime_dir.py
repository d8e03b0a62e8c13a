"""Where a run keeps its sockets, its token and Ray's session: one private directory, gone when the run is.

1. `RuntimeDir.create` makes it (mode 0700) and holds a lock in it for as long as the run lives.
2. It first sweeps the directories of runs that died without cleaning up: those whose lock nobody holds.
3. `close` removes the directory. (KV pools are anonymous memory: the kernel frees them with their processes.)

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
_LOCK: Final = "lock"


class RuntimeDir:
    """One run's directory; made by `create` only."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor = lock_descriptor

    @classmethod
    def create(cls, parent: str | None = None) -> RuntimeDir:
        """A new directory below `parent` (default: the system's temporary directory).

        Raises:
            ConfigError: it cannot be made, or its path would be too long for sockets.
        """
        base = Path(parent).expanduser() if parent is not None else _default_parent()
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep(base)
            path = Path(tempfile.mkdtemp(prefix=NAME_PREFIX, dir=base.resolve()))
        except OSError as error:
            raise ConfigError(f"cannot make a runtime directory in {base}: {error.strerror}") from error
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            path.rmdir()
            raise ConfigError(
                f"the runtime directory {path} is longer than {MAX_PATH_BYTES} bytes, too long for sockets "
                f"below it: give a shorter one with --runtime-dir"
            )
        return cls(path, _locked(path / _LOCK))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_descriptor)


def sweep(base: Path) -> list[str]:
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
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


def _locked(lock: Path) -> int:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _default_parent() -> Path:
    directory = Path(tempfile.gettempdir())
    longest = len(os.fsencode(directory)) + len(NAME_PREFIX) + 10
    return directory if longest <= MAX_PATH_BYTES else Path("/tmp")
