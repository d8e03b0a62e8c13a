"""Peer processes for the edge tests: a parent that forks one child per connection, so a child starts in
milliseconds with torch already imported. A child obeys one JSON command per line and answers each.

Run as `python edge_peer.py <unix socket path>`; prints "ready" when it listens, ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

import msgspec
import torch

from cluster.errors import BatonError
from cluster.ids import Attempt, BlockId, Epoch, PieceIndex, RequestId, WorkerId
from cluster.kv.edge import EdgeConfig, EdgeName, KVReceiver, KVSender, Piece
from cluster.kv.edges import EdgeKind, make_pool, make_receiver, make_sender, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.wire.messages import KVGeometry
from tests.kv.stand_ins import use_one_way


class Peer:
    """One worker's end of one edge, driven by commands."""

    def __init__(self) -> None:
        self._pool: KVPool | None = None
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None

    def _setup(self, command: dict[str, Any]) -> tuple[EdgeKind, EdgeName, KVGeometry, EdgeConfig]:
        # NCCL takes two ranks on one GPU only from what look like two hosts.
        os.environ["NCCL_HOSTID"] = f"peer-{os.getpid()}"
        prefill, prefill_epoch, decode, decode_epoch = command["name"]
        name = EdgeName(WorkerId(prefill), Epoch(prefill_epoch), WorkerId(decode), Epoch(decode_epoch))
        geometry = msgspec.convert(command["geometry"], KVGeometry)
        return EdgeKind(command["kind"]), name, geometry, EdgeConfig(**command["config"])

    async def one_way(self, command: dict[str, Any]) -> dict[str, Any]:
        """Use staged edges as over NCCL, from now on."""
        use_one_way(setattr, command["stall_s"])
        return {}

    async def decode(self, command: dict[str, Any]) -> dict[str, Any]:
        """Be the decode worker."""
        kind, name, geometry, config = self._setup(command)
        self._pool = make_pool(kind, KVLayout.from_geometry(geometry))
        self._receiver = make_receiver(kind, self._pool, name=name, peer=geometry, config=config)
        return {"endpoint": self._receiver.endpoint()}

    async def prefill(self, command: dict[str, Any]) -> dict[str, Any]:
        """Be the prefill worker, with a pool of bytes drawn from `seed`."""
        kind, name, geometry, config = self._setup(command)
        self._pool = make_source_pool(kind, KVLayout.from_geometry(geometry))
        fill(self._pool.tensor, command["seed"])
        self._sender = make_sender(
            kind, self._pool, name=name, peer=geometry, endpoint=command["endpoint"], config=config
        )
        await self._sender.ready()
        return {}

    async def receive(self, command: dict[str, Any]) -> dict[str, Any]:
        """Post, wait and scatter a piece."""
        assert self._receiver is not None
        assert self._pool is not None
        piece = piece_from(command["piece"])
        await self._receiver.post(piece, piece.num_blocks * self._pool.layout.bytes_per_block)
        staged = await self._receiver.wait(piece)
        await self._receiver.scatter(staged, [BlockId(block) for block in command["targets"]])
        return {"num_bytes": staged.num_bytes}

    async def post(self, command: dict[str, Any]) -> dict[str, Any]:
        """Only post."""
        assert self._receiver is not None
        assert self._pool is not None
        piece = piece_from(command["piece"])
        await self._receiver.post(piece, piece.num_blocks * self._pool.layout.bytes_per_block)
        return {}

    async def send(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._sender is not None
        blocks = [BlockId(block) for block in command["sources"]]
        targets = [BlockId(block) for block in command["targets"]]
        return {"num_bytes": await self._sender.send(piece_from(command["piece"]), blocks, targets)}

    async def checksum(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._pool is not None
        return {"checksum": checksum(self._pool.tensor[command["blocks"]])}

    async def close(self, command: dict[str, Any]) -> dict[str, Any]:
        for end in (self._sender, self._receiver):
            if end is not None:
                await end.close()
        return {}

    async def run(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await getattr(self, command["do"])(command)
        except BatonError as error:
            answer = {"error": str(error)}
        return answer


def fill(pool: torch.Tensor, seed: int) -> None:
    """Random bytes, NaN patterns included."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(pool.view(torch.int16).shape, dtype=torch.int16)
    pool.view(torch.int16).copy_(values.random_(-(2**15), 2**15, generator=generator))


def checksum(blocks: torch.Tensor) -> int:
    """Depends on every byte and its place."""
    flat = blocks.cpu().contiguous().view(-1).view(torch.int16).to(torch.int64)
    weights = torch.arange(1, flat.numel() + 1) * 2654435761 % (2**31)
    return int((flat * weights).sum())


def piece_from(fields: list[Any]) -> Piece:
    request, attempt, index, first_block, num_blocks = fields
    return Piece(RequestId(request), Attempt(attempt), PieceIndex(index), first_block, num_blocks)


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    peer = Peer()
    writer.write(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    while line := await reader.readline():
        writer.write(json.dumps(await peer.run(json.loads(line))).encode() + b"\n")
        await writer.drain()


def main(path: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children reap themselves
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                asyncio.run(serve(connection))
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
