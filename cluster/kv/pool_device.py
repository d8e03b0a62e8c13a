"""KV pools in a GPU's memory, of one process or shared with another on the same host by CUDA IPC.

Life of a shared one:

1. D allocates a page for a header (magic, random nonce, geometry, as `cluster.kv.pool` has it) and the blocks
   behind it as one buffer, and exports it once, before anybody else uses it.
2. `endpoint()` travels to P: pid, nonce, and the handle as MessagePack in hex. No pickle: the handle is data.
3. P opens the handle on its own GPU, and trusts the memory only if the header in it is the announced one.
   That works whether or not P sees D's GPU (the driver finds it by the handle), and takes nothing of D's GPU.
   If they are two, the one must reach the other's memory: where both are seen the driver is asked, and
   opening the handle says so in any case. `EdgeUnfit` if it does not.
4. D alone frees, when its pool closes: after its edges, at the end of its process. P unmaps when its sender
   closes. If P dies the driver unmaps; if D dies the driver keeps the memory until P unmaps, so that P's copy
   lands in blocks that nobody reads, never in another's.

What torch counts across processes frees nothing early here: there is one export, and it lives as long as D.
A crashed D leaves torch's counter file (80 KB) in /dev/shm. D's proof of a dead writer
(`cluster.kv.process_watch`) holds on a GPU too: the driver ends a process's work before the process is gone.
CUDA MPS breaks that, since its server does the work: do not use this edge under MPS.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from cluster.errors import ConfigError, EdgeError, EdgeUnfit, first_line
from cluster.kv.edge_device import copy_stream
from cluster.kv.layout import KVLayout
from cluster.kv.memory import GIB
from cluster.kv.pool import HEADER_BYTES, TORCH_DTYPES, KVPool, check_header, pool_header
from cluster.wire.messages import KVGeometry


class CudaIpcHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One exported allocation: what torch's `_share_cuda_` gives, with the device's UUID for its index."""

    device: str
    memory: bytes  # the driver's handle of the allocation, as torch tags it
    size_bytes: int
    offset_bytes: int  # of the buffer within the allocation
    counter: bytes  # name of torch's file of reference counts
    counter_offset: int
    event: bytes  # torch's; not waited for: all that was written to the pool was done before the export
    event_required: bool

    def to_text(self) -> str:
        return msgspec.msgpack.encode(self).hex()


def handle_from_text(text: str) -> CudaIpcHandle:
    """
    Raises:
        EdgeError: it is not one that `to_text` made.
    """
    try:
        return msgspec.msgpack.decode(bytes.fromhex(text), type=CudaIpcHandle)
    except (ValueError, msgspec.MsgspecError) as error:
        raise EdgeError(f"a KV pool on a GPU came with a broken IPC handle: {error}") from error


def device_pool(layout: KVLayout, device: torch.device, num_scratch_blocks: int = 0) -> KVPool:
    """A fresh zero pool that only this process sees, with `num_scratch_blocks` of nobody behind its own.

    Raises:
        ConfigError: the GPU has not so much memory.
    """
    num_blocks = layout.num_blocks + num_scratch_blocks
    buffer = _allocate(num_blocks * layout.bytes_per_block, device)
    return KVPool(layout, _blocks_in(buffer, layout, num_blocks, 0))


def shared_device_pool(layout: KVLayout, device: torch.device, num_scratch_blocks: int = 0) -> KVPool:
    """One that another process on this host can map, given `endpoint()`; the scratch blocks are not its to
    see.

    Raises:
        ConfigError: the GPU has not so much memory, or its memory cannot be exported.
    """
    num_blocks = layout.num_blocks + num_scratch_blocks
    buffer = _allocate(HEADER_BYTES + num_blocks * layout.bytes_per_block, device)
    nonce = secrets.token_bytes(16)
    header = torch.frombuffer(bytearray(pool_header(layout, nonce)), dtype=torch.uint8)
    buffer[: len(header)].copy_(header)
    torch.cuda.synchronize(buffer.device)  # before anyone can look
    try:
        exported = buffer.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise ConfigError(
            f"the KV pool's GPU memory cannot be shared ({first_line(error)}): use `--kv-edge nccl`, or "
            "unset `expandable_segments` in PYTORCH_CUDA_ALLOC_CONF"
        ) from error
    handle = CudaIpcHandle(_uuid(exported[0]), *exported[1:])
    whole = _blocks_in(buffer, layout, num_blocks, HEADER_BYTES)
    return KVPool(layout, whole, _Export(handle, nonce.hex()))


@dataclass(frozen=True, slots=True)
class _Export:
    """Nothing to close: the memory goes with the last tensor."""

    handle: CudaIpcHandle
    nonce: str

    def endpoint(self) -> dict[str, str | int]:
        return {"pid": os.getpid(), "nonce": self.nonce, "ipc": self.handle.to_text()}

    def close(self) -> None:
        return


def attach_device_pool(endpoint: dict[str, str | int], geometry: KVGeometry, device: torch.device) -> KVPool:
    """Map a peer's pool, whose `endpoint()` and geometry were announced, for copies on the GPU `device`. Its
    tensor counts as this GPU's, wherever its memory is.

    Raises:
        EdgeUnfit: `device` cannot use memory of the peer's GPU in place, or the peer is out of reach.
        EdgeError: the pool is not the announced one.
    """
    text, nonce = endpoint.get("ipc"), endpoint.get("nonce")
    if not (isinstance(text, str) and isinstance(nonce, str)):
        raise EdgeError(f"a shared KV pool on a GPU needs `pid`, `nonce` and `ipc`, not {sorted(endpoint)}")
    handle, layout = handle_from_text(text), KVLayout.from_geometry(geometry)
    expected = HEADER_BYTES + layout.pool_bytes
    if handle.size_bytes < expected:
        raise EdgeError(
            f"this is not the announced KV pool: {handle.size_bytes} bytes on the GPU, not {expected}"
        )
    index = device.index or 0
    try:
        _check_reach(index, handle.device)
        # The caller, an event loop, waits neither for the step that is running nor for another edge's peer.
        with torch.cuda.device(index), torch.cuda.stream(copy_stream(device)):
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                handle.memory,
                handle.size_bytes,
                handle.offset_bytes,
                handle.counter,
                handle.counter_offset,
                handle.event,
                False,
            )
            buffer = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
            header = bytes(buffer[:HEADER_BYTES].cpu().tolist())
    except RuntimeError as error:
        raise EdgeUnfit(
            f"the KV pool on GPU {handle.device} cannot be mapped ({first_line(error)}): GPU {_uuid(index)} "
            "does not reach its memory, or the worker runs as another user or in another container"
        ) from error
    check_header(header, f"the memory mapped on GPU {handle.device}", nonce, geometry)
    return KVPool(layout, _blocks_in(buffer, layout, layout.num_blocks, HEADER_BYTES))


def why_no_device() -> str | None:
    """Why this process has no GPU to compute on; None: it has one. Touches no device."""
    if torch.cuda.is_available():
        return None
    build = "a build with CUDA" if torch.version.cuda else "a build without CUDA"
    return f"torch {torch.__version__} ({build}) sees none"


def current_device() -> torch.device:
    """The GPU that this process computes on; there is one."""
    return torch.device("cuda", torch.cuda.current_device())


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    try:
        buffer: Tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"the KV pool needs {num_bytes / GIB:.2f} GiB but {device} has {free / GIB:.2f} GiB free: lower "
            "the number of KV blocks (or use a smaller model or dtype)"
        ) from error
    return buffer


def _blocks_in(buffer: Tensor, layout: KVLayout, num_blocks: int, offset: int) -> Tensor:
    part = buffer[offset : offset + num_blocks * layout.bytes_per_block]
    return part.view(TORCH_DTYPES[layout.dtype]).view(num_blocks, *layout.block_shape)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _check_reach(index: int, uuid: str) -> None:
    """Ask the driver where it can be asked: about a GPU that this process sees, and is not its own.

    Raises:
        EdgeUnfit: no.
    """
    others = [other for other in range(torch.cuda.device_count()) if other != index and _uuid(other) == uuid]
    if others and not torch.cuda.can_device_access_peer(index, others[0]):
        raise EdgeUnfit(f"GPU {_uuid(index)} does not reach the memory of GPU {uuid} (no peer access)")
