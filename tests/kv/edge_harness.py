"""What the edge tests share: geometry, both ends of an edge in one process, and peers in others."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cluster.ids import Attempt, BlockId, Epoch, PieceIndex, RequestId, WorkerId
from cluster.kv.block_copy import Mover
from cluster.kv.edge import EdgeConfig, EdgeName, KVReceiver, KVSender, Piece
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_sender, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.wire.messages import KVGeometry
from tests.kv.edge_peer import fill

# Small blocks (6 KiB in bf16), and slots that hold four of them: pieces span parts and slots.
GEOMETRY = KVGeometry(
    first_layer=0,
    num_layers=3,
    first_head=0,
    num_heads=2,
    head_dim=32,
    block_size=8,
    num_blocks=48,
    dtype="bfloat16",
)
BLOCK_BYTES = KVLayout.from_geometry(GEOMETRY).bytes_per_block
CONFIG = EdgeConfig(
    connect_timeout_s=20.0,
    operation_timeout_s=20.0,
    close_timeout_s=20.0,
    slot_bytes=4 * BLOCK_BYTES,
    num_slots=3,
)


def edge_name(prefill: str = "prefill-0", epoch: int = 1) -> EdgeName:
    return EdgeName(WorkerId(prefill), Epoch(epoch), WorkerId("decode-0"), Epoch(1))


class EdgePair:
    """Both ends of an edge within this process, and both pools, P's full of random bytes."""

    mover: Mover | None = None  # of all pairs

    def __init__(self, kind: EdgeKind, geometry: KVGeometry, config: EdgeConfig, name: EdgeName) -> None:
        layout = KVLayout.from_geometry(geometry)
        self.kind, self.layout, self.config = kind, layout, config
        self.source, self.target = make_source_pool(kind, layout), make_pool(kind, layout)
        fill(self.source.tensor, seed=1)
        self.receiver: KVReceiver = make_receiver(
            kind, self.target, name=name, peer=geometry, config=config, mover=self.mover
        )
        self.sender: KVSender = make_sender(
            kind,
            self.source,
            name=name,
            peer=geometry,
            endpoint=self.receiver.endpoint(),
            config=config,
            target=self.target,
            mover=self.mover,
        )
        self._pieces = itertools.count()

    async def ready(self) -> None:
        await asyncio.gather(self.sender.ready(), self.receiver.ready())

    def piece(self, num_blocks: int) -> Piece:
        return Piece(RequestId("r"), Attempt(1), PieceIndex(next(self._pieces)), 0, num_blocks)

    def piece_bytes(self, piece: Piece) -> int:
        return piece.num_blocks * self.layout.bytes_per_block

    async def transfer(self, sources: Sequence[int], targets: Sequence[int]) -> int:
        """As the hand-off and the intake do it; returns the bytes sent."""
        piece = self.piece(len(sources))
        source_ids, target_ids = [BlockId(b) for b in sources], [BlockId(b) for b in targets]
        if self.sender.in_place:
            return await self.sender.send(piece, source_ids, target_ids)
        await self.receiver.post(piece, self.piece_bytes(piece))
        staged, num_bytes = await asyncio.gather(
            self.receiver.wait(piece), self.sender.send(piece, source_ids, target_ids)
        )
        assert staged.num_bytes == num_bytes
        await self.receiver.scatter(staged, target_ids)
        return num_bytes

    def bits(self, pool: KVPool, blocks: Sequence[int]) -> torch.Tensor:
        """Contents of blocks, bit by bit comparable."""
        found: torch.Tensor = pool.tensor.view(torch.int16)[list(blocks)]
        return found

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())
        self.source.close()
        self.target.close()


EdgePairs = Callable[..., Awaitable[EdgePair]]


class PeerProcess:
    """A child of `edge_peer.py`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader, self._writer, self.pid = reader, writer, pid

    def tell(self, do: str, **arguments: Any) -> None:
        self._writer.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            line = await self._reader.readline()
        assert line, f"peer {self.pid} died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return await self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._writer.transport.abort()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the test did it


def setup_of(
    kind: EdgeKind, name: EdgeName, geometry: KVGeometry = GEOMETRY, config: EdgeConfig = CONFIG
) -> dict[str, Any]:
    """What a peer process needs to build its end."""
    return {
        "kind": kind.value,
        "name": [name.prefill, name.prefill_epoch, name.decode, name.decode_epoch],
        "geometry": msgspec.to_builtins(geometry),
        "config": {field: getattr(config, field) for field in config.__dataclass_fields__},
    }


def piece_of(index: int, num_blocks: int, request: str = "r") -> Piece:
    return Piece(RequestId(request), Attempt(1), PieceIndex(index), 0, num_blocks)


def fields(piece: Piece) -> list[Any]:
    return list(dataclasses.astuple(piece))


def ids(blocks: Any) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


async def sender_to(
    peer: PeerProcess, kind: EdgeKind, source: KVPool, name: EdgeName | None = None, **config: Any
) -> KVSender:
    """Make `peer` a decode worker; returns our sender to it."""
    name, edge_config = name or edge_name(), dataclasses.replace(CONFIG, **config)
    geometry = source.layout.to_geometry()
    answer = await peer.ask("decode", **setup_of(kind, name, geometry, edge_config))
    sender = make_sender(
        kind, source, name=name, peer=geometry, endpoint=answer["endpoint"], config=edge_config
    )
    await sender.ready()
    return sender


async def receiver_from(
    peer: PeerProcess, kind: EdgeKind, target: KVPool, name: EdgeName | None = None, **config: Any
) -> KVReceiver:
    """Make `peer` a prefill worker; returns our receiver from it."""
    name, edge_config = name or edge_name(), dataclasses.replace(CONFIG, **config)
    geometry = target.layout.to_geometry()
    receiver = make_receiver(kind, target, name=name, peer=geometry, config=edge_config)
    setup = setup_of(kind, name, geometry, edge_config)
    await asyncio.gather(peer.ask("prefill", **setup, endpoint=receiver.endpoint(), seed=5), receiver.ready())
    return receiver


StartPeer = Callable[[], Awaitable[PeerProcess]]


def resources() -> dict[str, int]:
    """What an edge may leak."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "pools": maps.count("memfd:baton-kv"),
        # OpenMP has one for every process of the machine, whose they are not.
        "segments": sum(not name.startswith("__KMP_REGISTERED_LIB_") for name in os.listdir("/dev/shm")),
    }


async def nothing_leaked(before: dict[str, int]) -> bool:
    """Whether no more is held than before, a moment later at most: threads that were joined are still there
    until the system has ended them."""
    deadline = time.monotonic() + 20
    while any(number > before[name] for name, number in resources().items()):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True
