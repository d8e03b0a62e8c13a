"""Building the two ends of an edge by its kind. Kinds:

- `local`: P and D share a process.
- `shm`: one host; P writes into D's pool, which is shared memory.
- `gloo`: any two hosts; torch.distributed, through staging on both sides.

D makes its pool with `make_pool` for the kind it offers, one receiver per peer with `make_receiver` at
`EdgeHello`, and answers with the receiver's endpoint; P makes its sender from that answer.
"""

from __future__ import annotations

from enum import Enum

from cluster.errors import ConfigError, EdgeError
from cluster.kv.block_copy import BlockRegion
from cluster.kv.edge import EdgeConfig, EdgeName, KVReceiver, KVSender
from cluster.kv.edge_gloo import GlooReceiver, GlooSender
from cluster.kv.edge_local import InPlaceReceiver, InPlaceSender
from cluster.kv.edge_shm import shm_sender
from cluster.kv.layout import KVLayout, LayoutEdge, single_edge
from cluster.kv.pool import KVPool
from cluster.wire.messages import KVGeometry


class EdgeKind(Enum):
    """The values are those of `--kv-edge` and `EdgeHello.kind`."""

    LOCAL = "local"
    SHM = "shm"
    GLOO = "gloo"


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


def make_pool(kind: EdgeKind, layout: KVLayout) -> KVPool:
    """A decode worker's pool, in memory that edges of this kind can reach."""
    return KVPool.shared(layout) if kind is EdgeKind.SHM else KVPool.private(layout)


def make_receiver(
    kind: EdgeKind,
    pool: KVPool,
    *,
    name: EdgeName,
    peer: KVGeometry,
    host: str = "127.0.0.1",
    edge: LayoutEdge | None = None,
    config: EdgeConfig | None = None,
) -> KVReceiver:
    """D's end towards the prefill worker of geometry `peer`. Needs a running event loop.

    `host` is where a network edge listens: an address that P can reach. `edge` is what it carries, from
    `cluster.kv.layout.intersect`; None when both groups have one rank.

    Raises:
        EdgeError: the layouts do not match, or it cannot listen.
    """
    edge = edge or single_edge(peer, pool.layout.to_geometry())
    config = config or EdgeConfig()
    match kind:
        case EdgeKind.LOCAL:
            return InPlaceReceiver(name, {})
        case EdgeKind.SHM:
            return InPlaceReceiver(name, pool.endpoint())
        case EdgeKind.GLOO:
            return GlooReceiver(name, BlockRegion.of_pool(pool.tensor, pool.layout, edge), host, config)


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
) -> KVSender:
    """P's end, from `pool` to the decode worker of geometry `peer` that answered with `endpoint`.

    `target` is D's pool, for `local` only. `edge` as in `make_receiver`. `await sender.ready()` before use.

    Raises:
        EdgeError: the layouts do not match, the endpoint is wrong, or D is gone.
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
        case EdgeKind.GLOO:
            return GlooSender(name, source, endpoint, config)
