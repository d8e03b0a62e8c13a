"""The edges between two processes on one host: P maps D's pool and copies granted blocks into it in place.
Over `shm` the pool is host memory (`cluster.kv.pool`), over `cuda_ipc` a GPU's (`cluster.kv.pool_device`).

What keeps a writer out of blocks that were reassigned is the protocol (lease, attempt, `KvClosed`, and D's
proof that a lost writer is dead: `cluster.kv.process_watch`), not this file. What this file promises: it maps
the announced pool of the announced process or fails; it reports a dead D at the next piece; after `close`
it writes nothing.

A write into the pool of a D that died since the last piece harms nobody: while P has it mapped, the memory
is no one else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cluster.errors import ConfigError, EdgeError, EdgeUnfit
from cluster.kv.block_copy import BlockRegion
from cluster.kv.edge import EdgeConfig, EdgeName
from cluster.kv.edge_local import InPlaceSender
from cluster.kv.layout import LayoutEdge
from cluster.kv.pool import KVPool, attach_pool
from cluster.kv.process_watch import has_exited, open_process
from cluster.wire.messages import KVGeometry

Attach = Callable[[dict[str, str | int], KVGeometry], KVPool]


def shm_sender(
    name: EdgeName,
    pool: KVPool,
    peer: KVGeometry,
    endpoint: dict[str, str | int],
    edge: LayoutEdge,
    config: EdgeConfig,
    attach: Attach = attach_pool,
) -> InPlaceSender:
    """P's end. `endpoint` is `KVPool.endpoint()` of D's shared pool, `peer` its geometry; `attach` maps it.

    Raises:
        EdgeUnfit: D's pool cannot be reached from here, though D is alive.
        EdgeError: D is gone, or its pool is not the announced one.
    """
    pid = endpoint.get("pid")
    if not isinstance(pid, int):
        raise EdgeError(f"KV edge {name}: a shared KV pool needs a `pid`, not {sorted(endpoint)}")
    try:
        pidfd = open_process(pid)
    except ConfigError as error:
        raise EdgeError(f"KV edge {name}: {error}") from error
    if pidfd is None:
        raise EdgeError(f"KV edge {name}: the decode worker's process {pid} has exited")
    try:
        try:
            target = attach(endpoint, peer)
        except EdgeUnfit:
            if not has_exited(pidfd):
                raise
            raise EdgeError(f"KV edge {name}: the decode worker's process {pid} has exited") from None
        # Still alive after the nonce was checked: the pidfd means the process that owns this pool.
        if has_exited(pidfd):
            raise EdgeError(f"KV edge {name}: the decode worker's process {pid} has exited")
        regions = (
            BlockRegion.of_pool(pool.tensor, pool.layout, edge),
            BlockRegion.of_pool(target.tensor, target.layout, edge),
        )
        target.close()  # the region keeps the mapping
        return InPlaceSender(
            name,
            *regions,
            config,
            peer_lost=lambda: has_exited(pidfd),
            release=lambda: os.close(pidfd),
        )
    except BaseException:
        os.close(pidfd)
        raise
