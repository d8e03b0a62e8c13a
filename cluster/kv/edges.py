"""Building the two ends of an edge by its kind. Kinds:

- `local`: P and D share a process.
- `shm`: one host; P writes into D's pool, which is shared memory.
- `gloo`: any two hosts; torch.distributed, through staging on both sides.
- `cuda_ipc`: one host with GPUs; P writes into D's pool, which is shared GPU memory. Where P's GPU cannot
  reach it, the two fall back to another kind (`cluster.kv.edge_fallback`).
- `nccl`: GPUs of any two hosts; as `gloo`, between GPU memories.

D makes one receiver per peer with `make_receiver` at `EdgeHello`, and answers with the receiver's endpoint; P
makes its sender from that answer.

Where a worker keeps its KV is its engine's choice, and so the engine makes the pool: `check_kind` and
`check_memory` say before that whether edges of a kind can work with it. `make_pool` (D's) and
`make_source_pool` (P's) are for edges without an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from functools import partial

from cluster.errors import ConfigError, EdgeError
from cluster.kv.block_copy import BlockRegion, Mover
from cluster.kv.edge import EdgeConfig, EdgeName, KVReceiver, KVSender
from cluster.kv.edge_backends import Gloo, GroupBackend, Nccl, why_no_nccl
from cluster.kv.edge_group import GroupReceiver, GroupSender
from cluster.kv.edge_limit import EdgeLimit
from cluster.kv.edge_local import InPlaceReceiver, InPlaceSender
from cluster.kv.edge_shm import shm_sender
from cluster.kv.layout import KVLayout, LayoutEdge, single_edge
from cluster.kv.pool import KVPool
from cluster.kv.pool_device import (
    attach_device_pool,
    current_device,
    device_pool,
    shared_device_pool,
    why_no_device,
)
from cluster.wire.messages import KVGeometry


class EdgeKind(Enum):
    """The values are those of `--kv-edge` and `EdgeHello.kind`."""

    LOCAL = "local"
    SHM = "shm"
    GLOO = "gloo"
    CUDA_IPC = "cuda_ipc"
    NCCL = "nccl"

    @property
    def on_gpu(self) -> bool:
        """Whether both pools lie in GPU memory."""
        return self in (EdgeKind.CUDA_IPC, EdgeKind.NCCL)

    @property
    def in_ds_pool(self) -> bool:
        """Whether P writes into D's pool from another process, so that D's has to be shared."""
        return self in (EdgeKind.SHM, EdgeKind.CUDA_IPC)


def edge_kind(name: str) -> EdgeKind:
    """The kind called `name`.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    try:
        return EdgeKind(name)
    except ValueError:
        kinds = ", ".join(kind.value for kind in EdgeKind)
        raise ConfigError(f"unknown KV edge `{name}`: use one of {kinds}") from None


def check_kind(kind: EdgeKind) -> None:
    """Whether this process can have edges of this kind at all. Touches no device.

    Raises:
        ConfigError: it needs a GPU, or a library, that is not here.
    """
    if not kind.on_gpu:
        return
    if reason := why_no_device():
        raise ConfigError(
            f"--kv-edge {kind.value} needs a CUDA device: {reason}; use `--kv-edge shm` on one host, "
            "`gloo` across hosts"
        )
    if kind is EdgeKind.NCCL and (reason := why_no_nccl(os.environ)):
        raise ConfigError(f"--kv-edge nccl: {reason}")


def check_memory(kind: EdgeKind, device_type: str) -> None:
    """Whether edges of this kind can reach the KV of an engine that keeps it on a device of this type.

    Raises:
        ConfigError: it moves KV between GPUs, and this KV lies elsewhere.
    """
    if kind.on_gpu and device_type != "cuda":
        raise ConfigError(
            f"--kv-edge {kind.value} moves KV between GPUs, and this worker's backend keeps it in memory of "
            "the host: choose a backend that computes on a GPU, or `--kv-edge shm` or `gloo`"
        )


def make_pool(kind: EdgeKind, layout: KVLayout) -> KVPool:
    """A decode worker's pool, in memory that edges of this kind can reach.

    Raises:
        ConfigError: there is not so much memory, or no GPU for a kind that needs one.
    """
    if not kind.in_ds_pool:
        return make_source_pool(kind, layout)
    check_kind(kind)
    return shared_device_pool(layout, current_device()) if kind.on_gpu else KVPool.shared(layout)


def make_source_pool(kind: EdgeKind, layout: KVLayout) -> KVPool:
    """A prefill worker's pool, which edges of this kind send from. Raises as `make_pool`."""
    check_kind(kind)
    return device_pool(layout, current_device()) if kind.on_gpu else KVPool.private(layout)


def make_receiver(
    kind: EdgeKind,
    pool: KVPool,
    *,
    name: EdgeName,
    peer: KVGeometry,
    host: str = "127.0.0.1",
    edge: LayoutEdge | None = None,
    config: EdgeConfig | None = None,
    limit: EdgeLimit | None = None,
    mover: Mover | None = None,
) -> KVReceiver:
    """D's end towards the prefill worker of geometry `peer`. Needs a running event loop.

    `host` is where a network edge listens: an address that P can reach. `edge` is what it carries, from
    `cluster.kv.layout.intersect`; None when both groups have one rank. `limit`: counts the NCCL edges;
    `mover`: of blocks between the pool and staging beside it.

    Raises:
        EdgeError: the layouts do not match, there are too many edges, or it cannot listen.
    """
    edge = edge or single_edge(peer, pool.layout.to_geometry())
    config = config or EdgeConfig()
    match kind:
        case EdgeKind.LOCAL:
            return InPlaceReceiver(name, {})
        case EdgeKind.SHM | EdgeKind.CUDA_IPC:
            return InPlaceReceiver(name, pool.endpoint())
        case EdgeKind.GLOO | EdgeKind.NCCL:
            region = BlockRegion.of_pool(pool.tensor, pool.layout, edge)
            release = _take(kind, limit, name)
            try:
                return GroupReceiver(name, region, host, config, _backend(kind, region), release, mover)
            except BaseException:
                release()
                raise


def make_sender(
    kind: EdgeKind,
    pool: KVPool,
    *,
    name: EdgeName,
    peer: KVGeometry,
    endpoint: dict[str, str | int],
    edge: LayoutEdge | None = None,
    config: EdgeConfig | None = None,
    target: KVPool | None = None,
    limit: EdgeLimit | None = None,
    mover: Mover | None = None,
) -> KVSender:
    """P's end, from `pool` to the decode worker of geometry `peer` that answered with `endpoint`.

    `target` is D's pool, for `local` only. `edge`, `limit`, `mover` as in `make_receiver`. `await
    sender.ready()` before use.

    Raises:
        EdgeUnfit: D's pool is out of P's reach for an edge of this kind.
        EdgeError: the layouts do not match, there are too many edges, the endpoint is wrong, or D is gone.
    """
    edge = edge or single_edge(pool.layout.to_geometry(), peer)
    config = config or EdgeConfig()
    source = BlockRegion.of_pool(pool.tensor, pool.layout, edge)
    match kind:
        case EdgeKind.LOCAL:
            if target is None:
                raise EdgeError(f"KV edge {name}: a local edge needs the decode side's pool")
            into = BlockRegion.of_pool(target.tensor, target.layout, edge)
            return InPlaceSender(name, source, into, config)
        case EdgeKind.SHM:
            return shm_sender(name, pool, peer, endpoint, edge, config)
        case EdgeKind.CUDA_IPC:
            attach = partial(attach_device_pool, device=pool.tensor.device)
            return shm_sender(name, pool, peer, endpoint, edge, config, attach)
        case EdgeKind.GLOO | EdgeKind.NCCL:
            release = _take(kind, limit, name)
            try:
                return GroupSender(name, source, endpoint, config, _backend(kind, source), release, mover)
            except BaseException:
                release()
                raise


def _backend(kind: EdgeKind, region: BlockRegion) -> GroupBackend:
    if kind is EdgeKind.NCCL:
        return Nccl(region.blocks.device)
    return Gloo()


def _take(kind: EdgeKind, limit: EdgeLimit | None, name: EdgeName) -> Callable[[], None]:
    """Count an edge that costs GPU memory; returns what gives its place back."""
    if limit is None or kind is not EdgeKind.NCCL:
        return lambda: None
    limit.open(name)
    return partial(limit.close, name)
