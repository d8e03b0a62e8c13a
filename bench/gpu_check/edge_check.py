"""Part (d): the edge between hosts, between two processes that look like two hosts. No rate is measured.

NCCL takes two ranks on one GPU only if they seem to be on two hosts (`NCCL_HOSTID`); their bytes then go
through sockets, as between hosts. Two processes on one GPU take turns, so nothing here says how fast it is.

1. Pieces of several sizes arrive as they were sent, in blocks of other numbers, and nothing else changes.
2. A piece that is no longer wanted lands in staging and is dropped: the pool stays as it was.
3. The prefill process is killed under a posted receive: the edge fails, within seconds, and the one beside it
   carries on.
4. The worker comes back with the next epoch: its new edge works.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from bench.gpu_check.peer import edge_config, mover_for, random_bytes
from bench.gpu_check.peer_messages import Dial, Send
from bench.gpu_check.peer_process import PeerProcess
from bench.gpu_check.report import Line
from cluster.errors import EdgeError
from cluster.ids import Attempt, BlockId, Epoch, PieceIndex, RequestId, WorkerId
from cluster.kv.edge import EdgeName, KVReceiver, Piece
from cluster.kv.edges import EdgeKind, make_pool, make_receiver
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool

NOTICED_S = 3.0  # the watchdog's second, an abort, and a busy machine
# Over sockets of this machine, whatever else it has, plugins too; what looks like another host is one.
AS_TWO_HOSTS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


@dataclass(frozen=True, slots=True)
class Sizes:
    layout: KVLayout
    slot_bytes: int
    pieces: tuple[int, ...]  # blocks of each


REAL = Sizes(  # blocks of 2 MiB
    KVLayout(range(32), range(8), 128, 16, 24, "bfloat16"), slot_bytes=4 * 2**20, pieces=(1, 2, 3, 8)
)
TINY = Sizes(
    KVLayout(range(2), range(2), 16, 8, 24, "bfloat16"), slot_bytes=2 * 2048 * 2, pieces=(1, 2, 3, 8)
)


class _Edge:
    """This process as decode worker, and another one as a prefill worker whose pool is drawn from `seed`."""

    def __init__(self, receiver: KVReceiver, peer: PeerProcess, layout: KVLayout, seed: int) -> None:
        self.receiver, self.peer, self._layout = receiver, peer, layout
        self._source = random_bytes(layout.shape, seed)
        self._num_pieces = 0

    @classmethod
    async def open(
        cls, kind: EdgeKind, pool: KVPool, prefill: str, epoch: int, sizes: Sizes, stack: AsyncExitStack
    ) -> _Edge:
        name = EdgeName(WorkerId(prefill), Epoch(epoch), WorkerId("decode"), Epoch(1))
        geometry, config = sizes.layout.to_geometry(), edge_config(sizes.slot_bytes)
        peer = await PeerProcess.start({**AS_TWO_HOSTS, "NCCL_HOSTID": f"{prefill}-{epoch}"})
        stack.push_async_callback(peer.end)
        receiver = make_receiver(kind, pool, name=name, peer=geometry, config=config, mover=mover_for(kind))
        stack.push_async_callback(receiver.close)
        dial = Dial(
            kind=kind.value,
            prefill=prefill,
            prefill_epoch=epoch,
            decode="decode",
            geometry=geometry,
            endpoint=receiver.endpoint(),
            slot_bytes=sizes.slot_bytes,
            seed=epoch,
        )
        await asyncio.gather(peer.ask(dial), receiver.ready())
        return cls(receiver, peer, sizes.layout, epoch)

    async def post(self, num_blocks: int) -> Piece:
        piece = Piece(RequestId("r"), Attempt(1), PieceIndex(self._num_pieces), 0, num_blocks)
        self._num_pieces += 1
        await self.receiver.post(piece, num_blocks * self._layout.bytes_per_block)
        return piece

    async def transfer(self, pool: KVPool, num_blocks: int, *, keep: bool = True) -> bool:
        """A piece from P's last blocks into D's first ones; whether the pool is then what it must be."""
        sources = list(range(self._layout.num_blocks - num_blocks, self._layout.num_blocks))
        targets = [BlockId(block) for block in range(num_blocks)]
        words = pool.tensor.view(torch.int16)
        expected = words.cpu().clone()  # on the host `cpu` copies nothing
        if keep:
            expected[:num_blocks] = self._source[sources]
        piece = await self.post(num_blocks)
        _, staged = await asyncio.gather(
            self.peer.ask(Send(index=piece.index, sources=sources)), self.receiver.wait(piece)
        )
        if keep:
            await self.receiver.scatter(staged, targets)
        else:
            self.receiver.discard(staged)
        return bool(torch.equal(words.cpu(), expected))


async def check(kind: EdgeKind, sizes: Sizes) -> AsyncIterator[Line]:
    """`kind` is a staged edge."""
    if kind is EdgeKind.NCCL:
        os.environ.update({**AS_TWO_HOSTS, "NCCL_HOSTID": "decode"})
    async with AsyncExitStack() as stack:
        pool = make_pool(kind, sizes.layout)
        stack.callback(pool.close)
        edge, beside = await asyncio.gather(
            _Edge.open(kind, pool, "prefill-0", 1, sizes, stack),
            _Edge.open(kind, pool, "prefill-1", 1, sizes, stack),
        )
        for num_blocks in sizes.pieces:
            yield _holds(f"a piece of {num_blocks} blocks", await edge.transfer(pool, num_blocks))
        dropped = await edge.transfer(pool, sizes.pieces[-1], keep=False)
        yield _holds("a piece that is no longer wanted", dropped)

        piece = await edge.post(sizes.pieces[-1])
        waiting = asyncio.ensure_future(edge.receiver.wait(piece))
        await asyncio.wait({waiting}, timeout=0.1)  # on a GPU: it spins now
        edge.peer.kill()
        yield await _fails_soon(waiting)
        yield _holds("the edge beside it", await beside.transfer(pool, sizes.pieces[-1]))
        await edge.receiver.close()
        again = await _Edge.open(kind, pool, "prefill-0", 2, sizes, stack)
        yield _holds("the edge of the next epoch", await again.transfer(pool, sizes.pieces[-1]))


async def _fails_soon(waiting: Awaitable[object]) -> Line:
    name, begin_s = "the prefill process killed under a posted receive", time.monotonic()
    try:
        await waiting
    except EdgeError as error:
        seconds = time.monotonic() - begin_s
        said = str(error).split(": ")[1]  # behind the edge's name, before what libraries say
        cells = {"said": said, "within 1 s": "yes" if seconds < 1.0 else "no"}
        return Line(name, cells, holds=seconds < NOTICED_S)
    return Line(name, {"said": "nothing: the receive looks complete"}, holds=False)


def _holds(name: str, holds: bool) -> Line:
    return Line(name, {"said": "as it must be" if holds else "other bytes than were sent"}, holds=holds)
