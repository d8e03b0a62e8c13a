"""A large file read through huge pages, where the system can: how weights are written and mapped.

A decode step of one sequence reads every weight once, so with small pages it translates an address for every
4 KB. On two cores, `python -m bench.engine --quantization int8 --kv-dtype int8 --only "decode 1 x 256"` took
5.3 to 5.7 ms with small pages and 3.9 to 4.3 ms with huge ones.

1. `HugePageWriter` writes whole huge pages at a time: the page cache keeps them as they were written (ext4
   since Linux 6.16, XFS since 5.18).
2. `map_file_huge` maps from a huge page's boundary, asks for huge pages before there are any, and then reads
   the file: what comes from disk comes in such pieces.
3. What the page cache already holds in small pages, as of a file that was copied, stays so. Then the first
   huge page is dropped from it and read again. If it came as a huge one, the rest follows; what other
   processes map is never dropped.
4. Last, a kernel that puts pages of files together is asked to (Linux 6.1 with READ_ONLY_THP_FOR_FS).

Huge pages are advice: where they cannot be had, small ones serve, with the same bits. A file without a whole
one is mapped and no more.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import RawIOBase

from cluster.engine.file_lock import descriptor_lock
from cluster.kv.mapping import HUGE_PAGE_BYTES, collapse, map_readable, populate

logger = logging.getLogger(__name__)

_ENOUGH = 0.9  # of the whole huge pages of a file
_PATIENCE_S = 60.0  # with who reads the same file at the same time


class HugePageWriter:
    """Collects what is written to an unbuffered file until it fills a huge page; `close` writes the rest."""

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._pending = bytearray()

    def write(self, content: memoryview | bytes) -> None:
        rest = memoryview(content)
        while len(self._pending) + len(rest) >= HUGE_PAGE_BYTES:
            taken = HUGE_PAGE_BYTES - len(self._pending)
            self._pending += rest[:taken]
            rest = rest[taken:]
            self._flush()
        self._pending += rest

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        rest = memoryview(self._pending)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]  # fewer than asked for, if a disk is nearly full
        self._pending = bytearray()


def map_file_huge(fd: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """The file, read-only, all of it in memory. It stays mapped as long as the result does.

    Raises:
        ConfigError: it cannot be mapped.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return _read(fd, num_bytes)
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    with _alone(fd):
        buffer = _read(fd, num_bytes)
        if _huge_bytes(buffer) < _ENOUGH * whole:
            del buffer  # what is mapped is not dropped
            if _comes_huge(fd):
                os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
            buffer = _read(fd, num_bytes)
            if _huge_bytes(buffer) < _ENOUGH * whole:
                collapse(buffer)
    if logger.isEnabledFor(logging.DEBUG):
        huge = _huge_bytes(buffer)
        logger.debug("%d of %d MiB of weights are on huge pages", huge >> 20, num_bytes >> 20)
    return buffer


@contextmanager
def _alone(fd: int) -> Iterator[None]:
    """Workers that start together wait for one another: what one has mapped, another cannot drop."""
    with ExitStack() as held:
        try:
            held.enter_context(descriptor_lock(fd, _PATIENCE_S))
        except OSError as error:
            logger.debug("weights are mapped without a lock: %s", error or "somebody holds it for long")
        yield


def _read(fd: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    buffer = map_readable(num_bytes, fd)
    populate(buffer)
    return buffer


def _comes_huge(fd: int) -> bool:
    """Whether the first huge page of a file does, when it is read from disk again."""
    os.posix_fadvise(fd, 0, HUGE_PAGE_BYTES, os.POSIX_FADV_DONTNEED)
    return _huge_bytes(_read(fd, HUGE_PAGE_BYTES)) == HUGE_PAGE_BYTES


def _huge_bytes(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Of a mapping, on huge pages; 0 where the system does not say."""
    start, is_it, kilobytes = f"{ctypes.addressof(buffer):08x}-", False, 0
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                if line[0] in "0123456789abcdef":
                    if is_it:
                        break
                    is_it = line.startswith(start)
                elif is_it and line.startswith(("FilePmdMapped:", "ShmemPmdMapped:")):
                    kilobytes += int(line.split()[1])
    except OSError as error:
        logger.debug("this system does not say what is on huge pages: %s", error)
    return kilobytes << 10
