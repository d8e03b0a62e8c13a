"""An exclusive lock between processes, held on a file, with a deadline."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold `path` (created if missing) while the block runs; the kernel lets go of it if the process dies.

    Raises:
        TimeoutError: another process held it for longer than `timeout_s`.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(handle, timeout_s)
        yield
    finally:
        os.close(handle)


@contextmanager
def descriptor_lock(descriptor: int, timeout_s: float) -> Iterator[None]:
    """Hold an open file while the block runs.

    Raises:
        TimeoutError: as `file_lock`.
        OSError: it cannot be locked, as on some network file systems.
    """
    _acquire(descriptor, timeout_s)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _acquire(handle: int, timeout_s: float) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        acquired = threading.Event()
        # flock has no timeout, so a thread waits in it. It works on a handle of its own, which shares
        # the lock: after a timeout the thread gets the lock some day, closes the last handle and thereby
        # lets go of it again.
        waiting_handle = os.dup(handle)

        def wait() -> None:
            try:
                fcntl.flock(waiting_handle, fcntl.LOCK_EX)
                acquired.set()
            finally:
                os.close(waiting_handle)

        threading.Thread(target=wait, name="file-lock", daemon=True).start()
        if not acquired.wait(timeout_s):
            raise TimeoutError from None
