"""The in-place edges' common part, and the edge within one process: P copies straight into D's pool.

1. `InPlaceSender.send` queues a copy to the edge's own thread; the event loop goes on.
2. The thread copies the blocks to the granted ids, without the GIL, looking between runs of blocks whether
   the edge was closed. On a GPU the copies run on the edge's own stream, and the thread waits for its end: a
   piece is sent when D may compute with it.
3. `close` stops the copy there and waits for the thread: after it, nothing is written. The thread lets go of
   D's memory, too: unmapping memory of a GPU waits for a stream, and the event loop must not.

The receiver has nothing to do: P tells D by message what lies in its blocks (`KvPiece`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cluster.errors import EdgeError
from cluster.ids import BlockId
from cluster.kv.block_copy import BlockRegion, copy_blocks
from cluster.kv.edge import EdgeConfig, EdgeName, Piece, Staged
from cluster.kv.edge_device import CopyQueue
from cluster.kv.edge_thread import EdgeThread


class InPlaceSender:
    """Copies blocks from P's region to D's, which this process can write.

    `peer_lost()` is asked before and after each piece; `release()` is called once at the end of `close`.
    """

    in_place = True

    def __init__(
        self,
        name: EdgeName,
        source: BlockRegion,
        target: BlockRegion,
        config: EdgeConfig,
        *,
        peer_lost: Callable[[], bool] = lambda: False,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._regions: tuple[BlockRegion, BlockRegion] | None = (source, target)
        self._config = config
        self._queue = CopyQueue(source.blocks.device)
        self._peer_lost = peer_lost
        self._release = release
        self._ended: str | None = None  # why nothing is sent any more; read by the thread
        self._is_closing = False
        self._thread = EdgeThread(f"kv-edge {name}")

    async def ready(self) -> None:
        self._check_alive()

    async def send(
        self, piece: Piece, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]
    ) -> int:
        self._check_alive()
        if not len(source_blocks) == len(target_blocks) == piece.num_blocks:
            raise EdgeError(
                f"KV edge {self._name}: a piece of {piece.num_blocks} blocks came with {len(source_blocks)} "
                f"source and {len(target_blocks)} target blocks"
            )
        timeout_s = self._config.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._thread.run(lambda: self._copy(source_blocks, target_blocks))
        except TimeoutError:
            self._ended = f"a copy took more than {timeout_s:g} s"
            self._check_alive()
            raise

    async def close(self) -> None:
        if self._ended is None:
            self._ended = "closed"
        if not self._is_closing:
            self._is_closing = True
            self._thread.submit(self._let_go)
        await self._thread.join(self._config.close_timeout_s)
        release, self._release = self._release, lambda: None
        release()

    def _copy(self, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]) -> int:
        self._check_alive()
        assert self._regions is not None, "regions outlive the thread"
        source, target = self._regions
        try:
            with self._queue.order():
                done = copy_blocks(
                    source, source_blocks, target, target_blocks, lambda: self._ended is not None
                )
        finally:
            self._queue.finish()  # nothing of this job is still to be written when it ends, however it ends
        if not done or self._peer_lost():
            self._check_alive()
        return len(source_blocks) * source.block_bytes

    def _let_go(self) -> None:
        with self._queue.order():
            self._regions = None

    def _check_alive(self) -> None:
        if self._ended is None and self._peer_lost():
            self._ended = "the decode worker's process has exited"
        if self._ended is not None:
            raise EdgeError(f"KV edge {self._name}: {self._ended}")


class InPlaceReceiver:
    """D's end of an in-place edge: an address, and nothing to receive."""

    in_place = True

    def __init__(self, name: EdgeName, endpoint: dict[str, str | int]) -> None:
        self._name = name
        self._endpoint = endpoint

    def endpoint(self) -> dict[str, str | int]:
        return self._endpoint

    async def ready(self) -> None:
        return

    async def post(self, piece: Piece, num_bytes: int) -> None:
        raise self._not_staged()

    async def wait(self, piece: Piece) -> Staged:
        raise self._not_staged()

    async def scatter(self, staged: Staged, target_blocks: Sequence[BlockId]) -> None:
        raise self._not_staged()

    def discard(self, staged: Staged) -> None:
        raise self._not_staged()

    async def close(self) -> None:
        return

    def _not_staged(self) -> EdgeError:
        return EdgeError(f"KV edge {self._name}: pieces are written in place, nothing is received")
