"""The staged edges over torch.distributed: `gloo` between any two processes, `nccl` between GPUs. One class
for each end; what differs is a `GroupBackend`, and where the memory is.

Life of a piece:

1. P offers it; D takes staging slots (`edge_ring`) and posts the receives (`GroupReceiver.post`), then says
   `KvReady`. Nothing is posted that was not offered.
2. P cuts the piece into parts of a slot's size (both sides cut alike), gathers part by part into two slots of
   its own, and sends one while it gathers the next (`GroupSender.send`).
3. The parts land in D's slots and are checked to be this piece's (`wait`; how: `edge_group_parts`).
4. They touch the pool only in `scatter`, which D calls after it has checked attempt and lease again;
   otherwise `discard` frees the slots.

Transfers are matched by a tag made of the piece's identity where there are tags, and in order within a tag;
by order alone over NCCL. Order is the same on both sides: D posts in the order of offers, P sends in the
order of `KvReady`.

Threads: P's end has one for everything. D's end has two, so that posting and scattering need not wait until
a transfer under way has landed. The link has its watchdog, and the group threads of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from cluster.errors import EdgeError
from cluster.ids import BlockId
from cluster.kv.block_copy import BlockRegion, Mover, gather_blocks, scatter_blocks
from cluster.kv.edge import EdgeConfig, EdgeName, Piece, Staged
from cluster.kv.edge_backends import GroupBackend
from cluster.kv.edge_device import CopyQueue
from cluster.kv.edge_group_link import GroupLink
from cluster.kv.edge_group_parts import PartPosted, PartSent, Slots, piece_tags, trailer_of
from cluster.kv.edge_ring import Claim, StagingRing, cut, too_large
from cluster.kv.edge_thread import EdgeThread

_NUM_SENDER_SLOTS = 2


class GroupSender:
    """P's end."""

    in_place = False

    def __init__(
        self,
        name: EdgeName,
        source: BlockRegion,
        endpoint: dict[str, str | int],
        config: EdgeConfig,
        backend: GroupBackend,
        release: Callable[[], None] = lambda: None,
        mover: Mover | None = None,
    ) -> None:
        """Dials at once, in the edge's thread; `ready` tells the outcome. `release` is called when it is
        closed.

        Raises:
            EdgeError: the endpoint is not one of this kind, or D stages other blocks.
        """
        num_slots, blocks_per_slot = endpoint.get("num_slots"), endpoint.get("blocks_per_slot")
        if not (isinstance(num_slots, int) and isinstance(blocks_per_slot, int) and blocks_per_slot > 0):
            raise EdgeError(
                f"KV edge {name}: {backend.name} needs `num_slots` and `blocks_per_slot`: {sorted(endpoint)}"
            )
        if endpoint.get("block_bytes") != source.block_bytes:
            raise EdgeError(
                f"KV edge {name}: a block is {source.block_bytes} bytes here but "
                f"{endpoint.get('block_bytes')} on the decode worker"
            )
        self._name = name
        self._source, self._mover = source, mover
        self._config = config
        self._blocks_per_slot = blocks_per_slot
        self._max_blocks = num_slots * blocks_per_slot
        self._link = GroupLink.dial(name, endpoint, config.connect_timeout_s, backend)
        self._queue = CopyQueue(source.blocks.device)
        device = backend.staging_device(source.blocks.device)
        with self._queue.order():  # in memory that no kernel of the engine's may still use
            self._slots = Slots(source, _NUM_SENDER_SLOTS, blocks_per_slot, device)
        self._release = release
        self._thread = EdgeThread(f"kv-edge {name}")
        self._connected = self._thread.submit(lambda: _connect(self._link, self._queue, device))

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
            raise too_large(str(self._name), piece, self._max_blocks)
        await self.ready()
        return await self._thread.run(lambda: self._send(piece, source_blocks))

    async def close(self) -> None:
        await _close(self._link, [self._thread], self._config.close_timeout_s)
        self._release()

    def _send(self, piece: Piece, source_blocks: Sequence[BlockId]) -> int:
        """Gather a part while the one before it is on its way."""
        deadline = time.monotonic() + self._config.operation_timeout_s
        tags = piece_tags(piece)
        on_the_way: list[PartSent] = []  # at most one per slot, oldest first
        for index, part in enumerate(cut(piece.num_blocks, self._blocks_per_slot)):
            if len(on_the_way) == _NUM_SENDER_SLOTS:
                _finish(on_the_way.pop(0), self._link, deadline)
            slot = index % _NUM_SENDER_SLOTS
            blocks = source_blocks[part.start : part.stop]
            with self._queue.order():
                gather_blocks(self._source, blocks, self._slots.regions[slot], self._mover)
                if not self._link.backend.follows_streams:
                    self._queue.finish()
                data = self._slots.bytes_of(slot, len(part))
                room, trailer = self._slots.trailers[slot], trailer_of(piece, part)
                on_the_way.append(PartSent(self._link, data, room, trailer, tags))
        while on_the_way:
            _finish(on_the_way.pop(0), self._link, deadline)
        return piece.num_blocks * self._source.block_bytes


class _Receive:
    """The posted transfers of a piece on its way; when it has landed, its slots are its claim's."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.deadline = 0.0
        self.posted: list[PartPosted] = []
        self.landed: Future[None] | None = None  # the waiting for it, in the waiter's thread


class GroupReceiver:
    """D's end. State changes on the event loop; threads only move bytes."""

    in_place = False

    def __init__(
        self,
        name: EdgeName,
        target: BlockRegion,
        host: str,
        config: EdgeConfig,
        backend: GroupBackend,
        release: Callable[[], None] = lambda: None,
        mover: Mover | None = None,
    ) -> None:
        """Listens at once; waits for P's dial in the edge's thread. `release` is called when it is closed.

        Raises:
            EdgeError: `host` cannot be listened on.
        """
        self._name = name
        self._target, self._mover = target, mover
        self._config = config
        blocks_per_slot = max(1, config.slot_bytes // target.block_bytes)
        self._ring = StagingRing(str(name), config.num_slots, blocks_per_slot)
        self._queue = CopyQueue(target.blocks.device)
        device = backend.staging_device(target.blocks.device)
        with self._queue.order():  # in memory that no kernel of the engine's may still use
            self._slots = Slots(target, config.num_slots, blocks_per_slot, device)
        self._slot_freed = asyncio.Event()
        self._posting = asyncio.Lock()  # posts take slots, and are posted, in the order of the calls
        self._receives: dict[Piece, _Receive] = {}
        self._closed = False
        self._release = release
        self._link, self._endpoint = GroupLink.listen(name, host, config.connect_timeout_s, backend)
        self._endpoint |= {
            "num_slots": config.num_slots,
            "blocks_per_slot": blocks_per_slot,
            "block_bytes": target.block_bytes,
        }
        self._thread = EdgeThread(f"kv-edge {name}")  # connects, posts, scatters
        self._waiter = EdgeThread(f"kv-edge {name} wait")
        self._connected = self._thread.submit(lambda: _connect(self._link, self._queue, device))

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
        self._ring.check(piece)
        await self.ready()
        async with self._posting:
            receive = self._receives[piece] = _Receive(await self._claim(piece))
            await self._thread.run(lambda: self._post(receive))
            receive.landed = self._waiter.submit(lambda: self._wait(receive))

    async def wait(self, piece: Piece) -> Staged:
        self._ring.posted(piece)
        receive = self._receives[piece]
        if receive.landed is None:
            raise EdgeError(f"KV edge {self._name}: {piece} is not posted")
        await asyncio.shield(asyncio.wrap_future(receive.landed))
        handle = self._ring.landed(piece)
        del self._receives[piece]
        return Staged(piece, handle, piece.num_blocks * self._target.block_bytes)

    async def scatter(self, staged: Staged, target_blocks: Sequence[BlockId]) -> None:
        if len(target_blocks) != staged.piece.num_blocks:
            raise EdgeError(
                f"KV edge {self._name}: {staged.piece.num_blocks} blocks cannot go to {len(target_blocks)}"
            )
        self._check_open()
        claim = self._ring.leave(staged.piece, staged.slot)
        scattered = asyncio.wrap_future(self._thread.submit(lambda: self._scatter(claim, target_blocks)))
        # Not when the caller gives up, but when the thread does not read the slots any more.
        scattered.add_done_callback(lambda _: self._free(claim))
        await asyncio.shield(scattered)

    def discard(self, staged: Staged) -> None:
        if not self._closed:
            self._free(self._ring.leave(staged.piece, staged.slot))

    async def close(self) -> None:
        self._closed = True
        self._slot_freed.set()  # whoever waits for a slot learns of it
        try:
            await _close(self._link, [self._waiter, self._thread], self._config.close_timeout_s)
        finally:
            for receive in self._receives.values():
                receive.posted.clear()  # they hold the connection
            self._receives.clear()
        self._release()

    async def _claim(self, piece: Piece) -> Claim:
        """Slots for the piece, waiting for them within the deadline."""
        timeout_s = self._config.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self._check_open()
                while (claim := self._ring.claim(piece)) is None:
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
                    self._check_open()
                return claim
        except TimeoutError:
            raise EdgeError(
                f"KV edge {self._name}: no staging slot became free within {timeout_s:g} s"
            ) from None

    def _free(self, claim: Claim) -> None:
        self._ring.release(claim)
        self._slot_freed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise EdgeError(f"KV edge {self._name}: closed")

    def _post(self, receive: _Receive) -> None:
        receive.deadline = time.monotonic() + self._config.operation_timeout_s
        piece, tags = receive.claim.piece, piece_tags(receive.claim.piece)
        parts = cut(piece.num_blocks, self._ring.blocks_per_slot)
        for slot, part in zip(receive.claim.slots, parts, strict=True):
            data, expected = self._slots.bytes_of(slot, len(part)), trailer_of(piece, part)
            room = self._slots.trailers[slot]
            receive.posted.append(PartPosted(self._link, data, room, expected, tags, self._queue))

    def _wait(self, receive: _Receive) -> None:
        while receive.posted:
            _finish(receive.posted[0], self._link, receive.deadline)
            del receive.posted[0]  # not before: what is posted may be written to as long as it is not done

    def _scatter(self, claim: Claim, target_blocks: Sequence[BlockId]) -> None:
        parts = cut(claim.piece.num_blocks, self._ring.blocks_per_slot)
        try:
            with self._queue.order():
                for slot, part in zip(claim.slots, parts, strict=True):
                    done = scatter_blocks(
                        self._slots.regions[slot],
                        self._target,
                        target_blocks[part.start : part.stop],
                        self._mover,
                        lambda: self._closed,
                    )
                    if not done:
                        self._check_open()
        finally:
            self._queue.finish()


def _connect(link: GroupLink, queue: CopyQueue, device: torch.device) -> None:
    with queue.order():
        link.connect(torch.zeros(1, dtype=torch.uint8, device=device))


def _finish(part: PartSent | PartPosted, link: GroupLink, deadline: float) -> None:
    """Wait for a part whose turn it is: until its piece's deadline, or for as long as a part may stall."""
    stall_s = link.backend.stall_timeout_s
    part.finish(link, deadline if stall_s is None else min(deadline, time.monotonic() + stall_s))


async def _close(link: GroupLink, threads: list[EdgeThread], timeout_s: float) -> None:
    """Fail what waits, then end the threads, then let go of the link: from a thread of its own, since
    breaking off blocks for some milliseconds, and for ever where a group does not let go."""
    helper = EdgeThread(f"kv-edge {link.name} close")

    async def within(job: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await helper.run(job)
        except TimeoutError:
            raise EdgeError(f"KV edge {link.name}: not closed within {timeout_s:g} s") from None

    try:
        await within(lambda: link.break_off("closed"))
        for thread in threads:
            await thread.join(timeout_s)
        await within(link.close)
    finally:
        await helper.join(timeout_s)
