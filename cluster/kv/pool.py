"""A worker's KV pool: one tensor, in memory of its own or in memory that a peer on the same host can map.

Life of a shared pool:

1. The decode worker makes it with `KVPool.shared`: an anonymous memory file (`memfd_create`: it has no
   name, so a crash leaves nothing behind, and it is not bounded by the size of /dev/shm), sealed so that
   it can neither shrink nor grow under a peer. The first page is a header: magic, a random nonce, geometry.
2. `endpoint()` travels to the prefill worker in `EdgeWelcome`: pid, file descriptor, nonce.
3. The prefill worker opens `/proc/<pid>/fd/<fd>` with `attach_pool` and maps it. Pids and descriptors are
   reused by the kernel, so it trusts the file only if seals, size, nonce and geometry are the announced ones.
4. The memory goes back to the system when both have closed, or died: nothing has to be removed.

Fresh pools are zero, and lie on huge pages where the system has any (`cluster.kv.mapping`). A private pool
takes physical memory as blocks are first written, a shared one at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import struct
from dataclasses import dataclass
from math import prod
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from cluster.errors import ConfigError, EdgeError
from cluster.kv.layout import KVLayout
from cluster.kv.mapping import commit, dont_fork, map_file, map_private
from cluster.kv.memory import check_available
from cluster.wire.messages import KVGeometry

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}

HEADER_BYTES = mmap.PAGESIZE
_HEADER = struct.Struct("<8s16sI")  # magic, nonce, length of the geometry that follows (MessagePack)
_MAGIC = b"BATONKV1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ADVICE = "lower the number of KV blocks (or use a smaller model or dtype)"


class Reach(Protocol):
    """How another process gets at a pool's memory."""

    def endpoint(self) -> dict[str, str | int]: ...

    def close(self) -> None: ...


class KVPool:
    """A pool tensor and the memory under it.

    `tensor` is `[num_blocks, num_layers, 2, block_size, num_heads, row_size]`, contiguous. The memory is
    unmapped when the pool is closed *and* the last tensor that views it is gone. Pools on a GPU are made by
    `cluster.kv.pool_device`.
    """

    def __init__(self, layout: KVLayout, whole: Tensor, reach: Reach | None = None) -> None:
        """`whole`: the blocks of `layout`, and perhaps more."""
        self.layout = layout
        self._reach = reach
        self._whole: Tensor | None = whole

    @classmethod
    def private(cls, layout: KVLayout) -> KVPool:
        """A pool that only this process sees.

        Raises:
            ConfigError: there is not so much memory.
        """
        check_available(layout.pool_bytes, "the KV pool", _ADVICE)
        return cls(layout, _in_memory(layout, map_private(layout.pool_bytes), 0))

    @classmethod
    def shared(cls, layout: KVLayout) -> KVPool:
        """A pool that a process of the same user on this host can map, given `endpoint()`.

        Raises:
            ConfigError: there is not so much memory, or no memory file can be made.
        """
        check_available(layout.pool_bytes, "the KV pool", _ADVICE)
        num_bytes = HEADER_BYTES + layout.pool_bytes
        nonce = secrets.token_bytes(16)
        header = pool_header(layout, nonce)
        try:
            fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigError(f"no memory file can be made for the KV pool: {error}") from error
        try:
            os.ftruncate(fd, num_bytes)
            os.pwrite(fd, header, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = map_file(num_bytes, fd)
            commit(memory)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"no memory file can be made for the KV pool: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        return cls(layout, _in_memory(layout, memory, HEADER_BYTES), _MemoryFile(fd, nonce.hex()))

    @property
    def tensor(self) -> Tensor:
        return self.whole[: self.layout.num_blocks]

    @property
    def whole(self) -> Tensor:
        """`tensor` and the scratch blocks behind it: what a runner computes with."""
        if self._whole is None:
            raise EdgeError("the KV pool is closed")
        return self._whole

    def endpoint(self) -> dict[str, str | int]:
        """What `attach_pool` needs, or `attach_device_pool` for a pool on a GPU.

        Raises:
            ConfigError: the pool is private.
        """
        if self._reach is None:
            raise ConfigError("a private KV pool cannot be shared: make it with `KVPool.shared`")
        return self._reach.endpoint()

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        self._whole = None
        if self._reach is not None:
            self._reach.close()
            self._reach = None


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    """A pool's memory file, kept open for those who map it later."""

    fd: int
    nonce: str

    def endpoint(self) -> dict[str, str | int]:
        return {"pid": os.getpid(), "fd": self.fd, "nonce": self.nonce}

    def close(self) -> None:
        os.close(self.fd)


def pool_header(layout: KVLayout, nonce: bytes) -> bytes:
    """What stands before a shared pool's blocks, so that whoever maps it knows whose it is."""
    geometry = msgspec.msgpack.encode(layout.to_geometry())
    header = _HEADER.pack(_MAGIC, nonce, len(geometry)) + geometry
    if len(header) > HEADER_BYTES:
        raise ConfigError(f"the KV pool's header of {len(header)} bytes does not fit a page")
    return header


def attach_pool(endpoint: dict[str, str | int], geometry: KVGeometry) -> KVPool:
    """Map a peer's shared pool, whose `endpoint()` and geometry were announced.

    Raises:
        EdgeError: the pool is not reachable, or is not the announced one.
    """
    pid, fd, nonce = endpoint.get("pid"), endpoint.get("fd"), endpoint.get("nonce")
    if not (isinstance(pid, int) and isinstance(fd, int) and isinstance(nonce, str)):
        raise EdgeError(f"a shared KV pool needs `pid`, `fd` and `nonce`, not {sorted(endpoint)}")
    layout = KVLayout.from_geometry(geometry)
    num_bytes = HEADER_BYTES + layout.pool_bytes
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # The file may be anything by now: never wait for it, never make it our terminal.
        own_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise EdgeError(
            f"the KV pool of process {pid} cannot be opened ({error.strerror}): the worker is gone, or runs "
            "as another user or in another container; `--kv-edge gloo` works there"
        ) from error
    try:
        _check_file(own_fd, path, num_bytes)
        check_header(os.pread(own_fd, HEADER_BYTES, 0), path, nonce, geometry)
        memory = map_file(num_bytes, own_fd)
        dont_fork(memory)  # a child of ours must not outlive us as a writer
    except (OSError, ConfigError) as error:
        raise EdgeError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(own_fd)  # a mapping keeps its file
    return KVPool(layout, _in_memory(layout, memory, HEADER_BYTES))


def _in_memory(layout: KVLayout, memory: ctypes.Array[ctypes.c_char], offset: int) -> Tensor:
    """The pool's tensor; it keeps the memory."""
    flat: Tensor = torch.frombuffer(
        memory, dtype=TORCH_DTYPES[layout.dtype], count=prod(layout.shape), offset=offset
    )
    return flat.view(layout.shape)


def _check_file(fd: int, path: str, num_bytes: int) -> None:
    """A regular memory file of the right size that cannot shrink: reading it cannot raise SIGBUS."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise EdgeError(f"{path} is not a KV pool: not a memory file")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise EdgeError(f"{path} is not a KV pool: not a memory file") from error
    if seals & _SEALS != _SEALS:
        raise EdgeError(f"{path} is not a KV pool: its size is not sealed")
    if status.st_size != num_bytes:
        raise EdgeError(f"{path} is not the announced KV pool: {status.st_size} bytes, not {num_bytes}")


def check_header(header: bytes, path: str, nonce: str, geometry: KVGeometry) -> None:
    """Whether what stands before the blocks of a shared pool, found at `path`, is what was announced.

    Raises:
        EdgeError: it is not.
    """
    magic, found_nonce, length = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise EdgeError(f"{path} is not a KV pool: no header")
    if found_nonce.hex() != nonce:
        raise EdgeError(f"{path} is another KV pool than the announced one: the nonce differs")
    try:
        found = msgspec.msgpack.decode(header[_HEADER.size : _HEADER.size + length], type=KVGeometry)
    except msgspec.MsgspecError as error:
        raise EdgeError(f"{path} has a broken KV pool header: {error}") from error
    if found != geometry:
        raise EdgeError(f"{path} holds KV of another geometry than announced: {found}, not {geometry}")
