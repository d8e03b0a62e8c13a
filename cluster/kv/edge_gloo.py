"""The staged edge over torch.distributed's gloo: between any two hosts, or processes that share no memory.

Life of a piece:

1. P offers it; D takes staging slots and posts the receives (`GlooReceiver.post`), then says `KvReady`.
2. P cuts the piece into parts of a slot's size (both sides cut alike), gathers part by part into two slots of
   its own, and sends one while it gathers the next (`GlooSender.send`).
3. The parts land in D's slots and are checked to be this piece's (`wait`; how: `edge_gloo_parts`).
4. They touch the pool only in `scatter`, which D calls after it has checked attempt and lease again;
   otherwise `discard` frees the slots.

Transfers are matched by a tag made of the piece's identity, and in order within a tag. Order is the same on
both sides: D posts in the order of offers, P sends in the order of `KvReady`.

Threads: P's end has one for everything. D's end has two, so that posting and scattering need not wait until
a transfer under way has landed. gloo adds one of its own per edge that moves the bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cluster.errors import EdgeError
from cluster.ids import BlockId
from cluster.kv.block_copy import BlockRegion, copy_blocks
from cluster.kv.edge import EdgeConfig, EdgeName, Piece, Staged
from cluster.kv.edge_gloo_link import GlooLink
from cluster.kv.edge_gloo_parts import PartPosted, PartSent, Slots, piece_tags, trailer_of
from cluster.kv.edge_thread import EdgeThread

_NUM_SENDER_SLOTS = 2


class GlooSender:
    """P's end."""

    in_place = False

    def __init__(
        self,
        name: EdgeName,
        source: BlockRegion,
        endpoint: dict[str, str | int],
        config: EdgeConfig,
    ) -> None:
        """Dials at once, in the edge's thread; `ready` tells the outcome.

        Raises:
            EdgeError: the endpoint is not a gloo edge's, or D stages other blocks.
        """
        num_slots, blocks_per_slot = endpoint.get("num_slots"), endpoint.get("blocks_per_slot")
        if not (isinstance(num_slots, int) and isinstance(blocks_per_slot, int) and blocks_per_slot > 0):
            raise EdgeError(
                f"KV edge {name}: gloo needs `num_slots` and `blocks_per_slot`: {sorted(endpoint)}"
            )
        if endpoint.get("block_bytes") != source.block_bytes:
            raise EdgeError(
                f"KV edge {name}: a block is {source.block_bytes} bytes here but "
                f"{endpoint.get('block_bytes')} on the decode worker"
            )
        self._name = name
        self._source = source
        self._config = config
        self._max_blocks = num_slots * blocks_per_slot
        self._slots = Slots(source, _NUM_SENDER_SLOTS, blocks_per_slot)
        self._link = GlooLink.dial(name, endpoint, config.connect_timeout_s)
        self._thread = EdgeThread(f"kv-edge {name}")
        self._connected = self._thread.submit(self._link.connect)

    async def ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._connected))

    async def send(
        self, piece: Piece, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]
    ) -> int:
        if len(source_blocks) != piece.num_blocks:
            raise EdgeError(
                f"KV edge {self._name}: a piece of {piece.num_blocks} blocks came with {len(source_blocks)}"
            )
        if piece.num_blocks > self._max_blocks:
            raise _too_large(self._name, piece, self._max_blocks)
        await self.ready()
        return await self._thread.run(lambda: self._send(piece, source_blocks))

    async def close(self) -> None:
        await _close(self._link, [self._thread], self._config.close_timeout_s)

    def _send(self, piece: Piece, source_blocks: Sequence[BlockId]) -> int:
        """Gather a part while the one before it is on its way."""
        deadline = time.monotonic() + self._config.operation_timeout_s
        tags = piece_tags(piece)
        on_the_way: list[PartSent] = []  # at most one per slot, oldest first
        for index, part in enumerate(self._slots.parts(piece.num_blocks)):
            if len(on_the_way) == _NUM_SENDER_SLOTS:
                on_the_way.pop(0).finish(self._link, deadline)
            slot = index % _NUM_SENDER_SLOTS
            blocks = source_blocks[part.start : part.stop]
            copy_blocks(self._source, blocks, self._slots.regions[slot], range(len(part)), lambda: False)
            data = self._slots.bytes_of(slot, len(part))
            on_the_way.append(PartSent(self._link, data, trailer_of(piece, part), tags))
        while on_the_way:
            on_the_way.pop(0).finish(self._link, deadline)
        return piece.num_blocks * self._source.block_bytes


@dataclass(slots=True)
class _Receive:
    """A piece on its way: its slots in the order of its parts, and the posted transfers."""

    piece: Piece
    slots: list[int]
    deadline: float = 0.0
    posted: list[PartPosted] = field(default_factory=list)
    landed: Future[None] | None = None  # the waiting for it, in the waiter's thread


class GlooReceiver:
    """D's end. State changes on the event loop; threads only move bytes."""

    in_place = False

    def __init__(self, name: EdgeName, target: BlockRegion, host: str, config: EdgeConfig) -> None:
        """Listens at once; waits for P's dial in the edge's thread.

        Raises:
            EdgeError: `host` cannot be listened on.
        """
        self._name = name
        self._target = target
        self._config = config
        blocks_per_slot = max(1, config.slot_bytes // target.block_bytes)
        self._slots = Slots(target, config.num_slots, blocks_per_slot)
        self._free_slots = list(range(config.num_slots))
        self._slot_freed = asyncio.Event()
        self._posting = asyncio.Lock()  # posts take slots, and are posted, in the order of the calls
        self._posted: dict[Piece, _Receive] = {}
        self._staged: dict[int, _Receive] = {}
        self._next_handle = 0
        self._closed = False
        self._link, self._endpoint = GlooLink.listen(name, host, config.connect_timeout_s)
        self._endpoint |= {
            "num_slots": config.num_slots,
            "blocks_per_slot": blocks_per_slot,
            "block_bytes": target.block_bytes,
        }
        self._thread = EdgeThread(f"kv-edge {name}")  # connects, posts, scatters
        self._waiter = EdgeThread(f"kv-edge {name} wait")
        self._connected = self._thread.submit(self._link.connect)

    def endpoint(self) -> dict[str, str | int]:
        return self._endpoint

    async def ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._connected))

    async def post(self, piece: Piece, num_bytes: int) -> None:
        expected = piece.num_blocks * self._target.block_bytes
        if num_bytes != expected:
            raise EdgeError(
                f"KV edge {self._name}: {piece.num_blocks} blocks are {expected} bytes, "
                f"{num_bytes} were offered"
            )
        parts = self._slots.parts(piece.num_blocks)
        if len(parts) > self._config.num_slots:
            raise _too_large(self._name, piece, self._config.num_slots * self._slots.blocks_per_slot)
        if piece in self._posted:
            raise EdgeError(f"KV edge {self._name}: {piece} is posted already")
        await self.ready()
        async with self._posting:
            receive = _Receive(piece, await self._take_slots(len(parts)))
            self._posted[piece] = receive
            await self._thread.run(lambda: self._post(receive, parts))
            receive.landed = self._waiter.submit(lambda: self._wait(receive))

    async def wait(self, piece: Piece) -> Staged:
        receive = self._posted.get(piece)
        if receive is None or receive.landed is None:
            raise EdgeError(f"KV edge {self._name}: {piece} is not posted")
        await asyncio.shield(asyncio.wrap_future(receive.landed))
        del self._posted[piece]
        handle = self._next_handle
        self._next_handle += 1
        self._staged[handle] = receive
        return Staged(piece, handle, piece.num_blocks * self._target.block_bytes)

    async def scatter(self, staged: Staged, target_blocks: Sequence[BlockId]) -> None:
        if len(target_blocks) != staged.piece.num_blocks:
            raise EdgeError(
                f"KV edge {self._name}: {staged.piece.num_blocks} blocks cannot go to {len(target_blocks)}"
            )
        self._check_open()
        receive = self._take_staged(staged)
        scattered = asyncio.wrap_future(self._thread.submit(lambda: self._scatter(receive, target_blocks)))
        # Not when the caller gives up, but when the thread does not read the slots any more.
        scattered.add_done_callback(lambda _: self._free(receive))
        await asyncio.shield(scattered)

    def discard(self, staged: Staged) -> None:
        if not self._closed:
            self._free(self._take_staged(staged))

    async def close(self) -> None:
        self._closed = True
        self._slot_freed.set()  # whoever waits for a slot learns of it
        try:
            await _close(self._link, [self._waiter, self._thread], self._config.close_timeout_s)
        finally:
            for receive in self._posted.values():
                receive.posted.clear()  # they hold the connection
            self._posted.clear()
            self._staged.clear()

    async def _take_slots(self, num_slots: int) -> list[int]:
        timeout_s = self._config.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._free_slots) < num_slots:
                    self._check_open()
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
        except TimeoutError:
            raise EdgeError(
                f"KV edge {self._name}: no staging slot became free within {timeout_s:g} s"
            ) from None
        self._check_open()
        return [self._free_slots.pop() for _ in range(num_slots)]

    def _take_staged(self, staged: Staged) -> _Receive:
        receive = self._staged.pop(staged.slot, None)
        if receive is None:
            raise EdgeError(f"KV edge {self._name}: {staged.piece} is not in staging")
        return receive

    def _free(self, receive: _Receive) -> None:
        self._free_slots += receive.slots
        self._slot_freed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise EdgeError(f"KV edge {self._name}: closed")

    def _post(self, receive: _Receive, parts: list[range]) -> None:
        receive.deadline = time.monotonic() + self._config.operation_timeout_s
        tags = piece_tags(receive.piece)
        for slot, part in zip(receive.slots, parts, strict=True):
            data, expected = self._slots.bytes_of(slot, len(part)), trailer_of(receive.piece, part)
            receive.posted.append(PartPosted(self._link, data, expected, tags))

    def _wait(self, receive: _Receive) -> None:
        while receive.posted:
            receive.posted.pop(0).finish(self._link, receive.deadline)

    def _scatter(self, receive: _Receive, target_blocks: Sequence[BlockId]) -> None:
        for slot, part in zip(receive.slots, self._slots.parts(receive.piece.num_blocks), strict=True):
            done = copy_blocks(
                self._slots.regions[slot],
                range(len(part)),
                self._target,
                target_blocks[part.start : part.stop],
                lambda: self._closed,
            )
            if not done:
                self._check_open()


def _too_large(name: EdgeName, piece: Piece, max_blocks: int) -> EdgeError:
    return EdgeError(
        f"KV edge {name}: a piece of {piece.num_blocks} blocks does not fit the staging of {max_blocks}; "
        "send smaller pieces or give the edge more slots"
    )


async def _close(link: GlooLink, threads: list[EdgeThread], timeout_s: float) -> None:
    """Fail what waits, then end the threads, then let go of the link: from a thread of its own, since
    breaking off blocks for some milliseconds."""
    helper = EdgeThread(f"kv-edge {link.name} close")
    try:
        await helper.run(lambda: link.break_off("closed"))
        for thread in threads:
            await thread.join(timeout_s)
        await helper.run(link.close)
    finally:
        await helper.join(timeout_s)
