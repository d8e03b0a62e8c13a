"""Memory aligned to huge pages, and on them where the system has any: zero, for KV pools, or a file's.

A decode step reads each block once, in stretches of some 24 KB, so with small pages it translates an address
for every 4 KB. `python -m bench.engine` told 248 ms for `decode 32 x 1024` before, 127 to 150 ms since.

1. `map_private` and `map_file` reserve more address space than they need, and map from the first huge page
   boundary in it. `mmap.mmap` cannot do that: it takes no address.
2. Private memory asks for huge pages; it gets them as it is first written.
3. A memory file gets them only when its pages exist: `commit` takes them all and has them put together. Every
   process that maps the file at such a boundary then has them.
4. The buffer unmaps itself when the last tensor that views it is gone, never at interpreter exit, where other
   threads may still compute.

Huge pages are advice: where they are refused, small ones serve, with the same bits.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from typing import Any

from cluster.errors import ConfigError

HUGE_PAGE_BYTES = 2 * 2**20
_PIECE_BYTES = 32 * HUGE_PAGE_BYTES  # committed at a time

# <linux/mman.h>; `mmap` names only some of them
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_WILLNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 3, 10, 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_FAILED = ctypes.c_void_p(-1).value

logger = logging.getLogger(__name__)


def map_private(num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory of this process alone.

    Raises:
        ConfigError: the system has no room for it.
    """
    buffer = _map(num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    _advise(_libc(), ctypes.addressof(buffer), _whole_pages(num_bytes), _MADV_HUGEPAGE)
    return buffer


def map_file(num_bytes: int, fd: int) -> ctypes.Array[ctypes.c_char]:
    """A memory file of `num_bytes`, shared with whoever else maps it.

    Raises:
        ConfigError: it cannot be mapped.
    """
    return _map(num_bytes, mmap.MAP_SHARED, fd)


def map_readable(num_bytes: int, fd: int) -> ctypes.Array[ctypes.c_char]:
    """A file of at least `num_bytes`, which nobody may write to through this mapping. It asks for huge pages.

    Raises:
        ConfigError: it cannot be mapped.
    """
    buffer = _map(num_bytes, mmap.MAP_SHARED, fd, mmap.PROT_READ)
    _advise(_libc(), ctypes.addressof(buffer), _whole_pages(num_bytes), _MADV_HUGEPAGE)
    return buffer


def populate(buffer: ctypes.Array[ctypes.c_char]) -> None:
    """Have all of a mapped file in memory; a file that cannot be read says so when it is."""
    libc, start = _libc(), ctypes.addressof(buffer)
    if _advise(libc, start, len(buffer), _MADV_POPULATE_READ):  # a kernel before 5.14: it is read ahead
        _advise(libc, start, len(buffer), _MADV_WILLNEED)


def collapse(buffer: ctypes.Array[ctypes.c_char]) -> bool:
    """Have small pages of a mapping put together, one huge page at a time; whether all were."""
    libc, start = _libc(), ctypes.addressof(buffer)
    for offset in range(0, _whole_pages(len(buffer)), HUGE_PAGE_BYTES):
        if error := _advise(libc, start + offset, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            logger.debug("a mapping stays on small pages: %s", os.strerror(error))
            return False
    return True


def commit(buffer: ctypes.Array[ctypes.c_char]) -> bool:
    """Take the physical memory of a mapped file now, on huge pages; whether all of it is on them.

    Raises:
        ConfigError: there is not so much memory.
    """
    libc, start = _libc(), ctypes.addressof(buffer)
    num_bytes, is_huge = len(buffer), True
    for offset in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - offset)
        error = _advise(libc, start + offset, size, _MADV_POPULATE_WRITE)
        if error == errno.EINVAL:  # a kernel before 5.14: pages come as they are written
            return False
        if error:
            raise ConfigError(f"memory for the KV pool cannot be had: {os.strerror(error)}")
        whole = _whole_pages(size)
        if is_huge and whole and (error := _advise(libc, start + offset, whole, _MADV_COLLAPSE)):
            logger.info("the KV pool stays on small pages: %s", os.strerror(error))
            is_huge = False
    return is_huge


def dont_fork(buffer: ctypes.Array[ctypes.c_char]) -> None:
    """Children of this process do not inherit the mapping.

    Raises:
        OSError: the kernel refuses.
    """
    error = _advise(_libc(), ctypes.addressof(buffer), len(buffer), _MADV_DONTFORK)
    if error:
        raise OSError(error, os.strerror(error))


def _map(
    num_bytes: int, flags: int, fd: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> ctypes.Array[ctypes.c_char]:
    libc = _libc()
    num_reserved = _pages(num_bytes) + HUGE_PAGE_BYTES
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = libc.mmap(None, num_reserved, 0, reserve, -1, 0)
    if base == _FAILED:
        raise _cannot_map(num_bytes)
    start = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if libc.mmap(start, num_bytes, access, flags | _MAP_FIXED, fd, 0) == _FAILED:
        error = _cannot_map(num_bytes)
        libc.munmap(base, num_reserved)
        raise error
    end = start + _pages(num_bytes)
    if start > base:
        libc.munmap(base, start - base)
    libc.munmap(end, base + num_reserved - end)
    buffer = (ctypes.c_char * num_bytes).from_address(start)
    unmap = weakref.finalize(buffer, libc.munmap, start, num_bytes)
    unmap.atexit = False
    return buffer


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _advise(libc: Any, address: int, num_bytes: int, advice: int) -> int:
    """0, or the error's number."""
    if num_bytes and libc.madvise(address, num_bytes, advice):
        return ctypes.get_errno()
    return 0


def _cannot_map(num_bytes: int) -> ConfigError:
    reason = os.strerror(ctypes.get_errno())
    return ConfigError(f"{num_bytes} bytes cannot be mapped: {reason}")


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _whole_pages(num_bytes: int) -> int:
    return num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
