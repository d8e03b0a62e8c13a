"""D's live KV side: it listens; prefill workers dial in, one stream and one receiver per peer.

1. `EdgeHello`: for this epoch, same model bits, fitting layout, an edge kind that both speak, or `Refused`
   with the reason. Then the receiver is ready, `EdgeWelcome` carries its endpoint, and the core hears
   `EdgeUp`. One that no request needs yet is refused while this worker is busy: setting it up would hold up
   what is here.
2. Messages become `FromPeer`. `PostReceive`, `Scatter` and `Discard` go to the receiver; what they
   lead to comes back as `ReceivePosted`, `PieceStaged`, `PieceScattered`.
3. Where this worker holds as many edges as it may, it asks for the one that was idle longest (`KvMakeRoom`).
4. The stream or the receiver breaks, even before it is ready: `EdgeDown`, once. For an in-place edge the peer
   may still write, so its process is watched and `WriterGone` follows when it is dead, or when the same
   process dials again (it closes its old sender before it does, see `prefill_worker.live_edges`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import EdgeCrowded, EdgeDeviceLost, EdgeError, ProtocolError, WireError
from cluster.kv.edge import KVReceiver
from cluster.kv.process_watch import process_exit
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome, KvMakeRoom, PrefillToDecode
from cluster.wire.messages import Refused
from cluster.wire.stream import Listener, Stream, listen
from cluster.worker_io import (
    Action,
    Discard,
    EdgeDown,
    EdgeUp,
    Event,
    FromPeer,
    Peer,
    PieceScattered,
    PieceStaged,
    PostReceive,
    ReceivePosted,
    Scatter,
    ScatterFailed,
    ToPeer,
    WriterGone,
)

logger = logging.getLogger(__name__)

Answer = Callable[[EdgeHello, bool], tuple[KVReceiver, EdgeWelcome]]

HANDSHAKE_TIMEOUT_S = 10.0
ROOM_TIMEOUT_S = 1.0  # for a prefill worker to close an idle edge


@dataclass(slots=True)
class _Edge:
    """One connected prefill worker; `broken` is completed by the first operation that fails."""

    stream: Stream[PrefillToDecode]
    receiver: KVReceiver
    broken: asyncio.Future[None]
    receives: set[asyncio.Task[None]] = field(default_factory=set)
    scatters: set[asyncio.Task[None]] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    used_s: float = 0.0  # by the loop's clock


class DecodeEdges:
    """Owns the KV listener and every edge of one decode worker."""

    def __init__(
        self,
        *,
        me: Peer,
        check_hello: Callable[[EdgeHello], str | None],
        answer: Answer,
        token: bytes,
        dispatch: Callable[[Event], None],
        is_busy: Callable[[], bool] = lambda: False,
        may_close: Callable[[Peer], bool] = lambda _: False,
        on_device_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`me`: this worker and its epoch; `check_hello` returns why a peer is refused, or None; `answer`
        chooses the kind of edge, and if that is allowed one that is not the best, where there is no room for
        it; `may_close`: an edge that is idle, and would make room."""
        self._may_close = may_close
        self._on_device_lost = on_device_lost
        self._is_busy = is_busy
        self._me = me
        self._check_hello = check_hello
        self._answer = answer
        self._token = token
        self._dispatch = dispatch
        self._edges: dict[Peer, _Edge] = {}
        self._watches: dict[Peer, asyncio.Task[None]] = {}
        self._listener: Listener | None = None
        self._closing = False

    async def start(self, address: str) -> str:
        """Listen at `address`; returns where to dial."""
        self._listener = await listen(address, self._token, PrefillToDecode, self._on_stream)
        return self._listener.address

    async def close(self) -> None:
        """Stop listening and end every edge."""
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def carry(self, action: Action) -> None:
        """Start what the core decided; the outcome comes back as an event, never synchronously."""
        match action:
            case ToPeer(peer, message):
                edge = self._edges.get(peer)
                if edge is not None:
                    edge.stream.post(message)
            case PostReceive(peer):
                edge = self._edges.get(peer)
                if edge is not None:  # otherwise its EdgeDown answers the action
                    _track(edge.receives, self._guard(edge, self._receive(edge, action)))
            case Scatter(peer):  # follows a PieceStaged at once, so its edge is there
                edge = self._edges[peer]
                _track(edge.scatters, self._guard(edge, self._scatter(edge, action)))
            case Discard(peer, staged):
                edge = self._edges.get(peer)
                if edge is not None:
                    edge.receiver.discard(staged)
            case _:
                raise TypeError(f"not an action of a decode worker: {type(action).__name__}")

    # ---- one edge ------------------------------------------------------------------------------

    async def _on_stream(self, stream: Stream[PrefillToDecode]) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            hello = await anext(aiter(stream), None)
        if hello is None:
            return
        if not isinstance(hello, EdgeHello):
            raise ProtocolError(f"expected EdgeHello, got {type(hello).__name__}")
        peer = Peer(hello.worker, hello.epoch)
        wanted = Peer(hello.decode_worker, hello.decode_epoch)
        if wanted != self._me:  # before an older edge is touched: that one may be in use
            reason: str | None = f"it looks for `{wanted.worker}` epoch {wanted.epoch}"
        else:
            reason = self._check_hello(hello)
        if reason is not None:
            logger.warning("refused a KV edge from `%s`: %s", hello.worker, reason)
            await stream.send(Refused(reason=reason))
            return
        if hello.warm and self._is_busy():
            await stream.send(Refused(reason="it is busy, and no request needs this edge yet"))
            return
        await self._end_older(peer)
        try:
            receiver, welcome = await self._receiver(hello, peer)
        except EdgeError as error:  # there are too many already, or no memory or address for it
            logger.warning("refused a KV edge from `%s`: %s", hello.worker, error)
            await stream.send(Refused(reason=str(error)))
            return
        loop = asyncio.get_running_loop()
        edge = _Edge(stream, receiver, loop.create_future(), used_s=loop.time())
        self._edges[peer] = edge
        reason = "closed by the prefill worker"
        try:
            stream.post(welcome)
            first = asyncio.ensure_future(anext(aiter(stream), None))
            try:
                await _ready(edge, first)
                self._dispatch(EdgeUp(peer, in_place=receiver.in_place))
                await self._serve(peer, edge, first)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        except (EdgeError, WireError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            logger.warning("KV edge from `%s` epoch %d: %s", peer.worker, peer.epoch, reason)
        finally:
            await self._end(peer, edge, hello.pid, reason)

    async def _receiver(self, hello: EdgeHello, peer: Peer) -> tuple[KVReceiver, EdgeWelcome]:
        """For a request, the prefill worker of the edge that was idle longest is asked to make room first.

        Raises:
            EdgeError: there is no room all the same, or no memory or address.
        """
        try:
            return self._answer(hello, hello.warm)
        except EdgeCrowded:
            if hello.warm:
                raise
        idle = [name for name in self._edges if name != peer and self._may_close(name)]
        if idle:
            oldest = self._edges[min(idle, key=lambda name: self._edges[name].used_s)]
            oldest.stream.post(KvMakeRoom())
            with suppress(TimeoutError):  # it is in use, as only its prefill worker knows
                async with asyncio.timeout(ROOM_TIMEOUT_S):
                    await oldest.ended.wait()
            await self._end_older(peer)  # one that was dialled meanwhile
        return self._answer(hello, True)

    async def _serve(self, peer: Peer, edge: _Edge, first: asyncio.Future[PrefillToDecode | None]) -> None:
        async def read() -> None:
            message = await first
            while message is not None:
                edge.used_s = asyncio.get_running_loop().time()
                self._dispatch(FromPeer(peer, message))
                message = await anext(aiter(edge.stream), None)

        reader = asyncio.create_task(read())
        try:
            await asyncio.wait({reader, edge.broken}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, edge.broken):
                if task.done():
                    task.result()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _end(self, peer: Peer, edge: _Edge, pid: int, reason: str) -> None:
        for receive in edge.receives:
            receive.cancel()
        await asyncio.gather(*edge.receives, return_exceptions=True)
        await asyncio.gather(*edge.scatters)  # local copies: they end, and the core waits for them
        try:
            await edge.receiver.close()
        except EdgeError as error:  # what hangs can reach staging alone: nothing is scattered any more
            logger.error("%s", error)
        if edge.broken.done() and not edge.broken.cancelled():
            edge.broken.exception()  # read above or overtaken by the stream's own end
        del self._edges[peer]
        if not self._closing:
            self._dispatch(EdgeDown(peer, reason))
            if edge.receiver.in_place:
                self._watches[peer] = asyncio.create_task(self._watch(peer, pid))
        edge.ended.set()

    # ---- operations of the receiver ------------------------------------------------------------

    async def _guard(self, edge: _Edge, operation: Coroutine[Any, Any, None]) -> None:
        try:
            await operation
        except EdgeError as error:
            if isinstance(error, EdgeDeviceLost):
                self._on_device_lost(str(error))
            if not edge.broken.done():
                edge.broken.set_exception(error)

    async def _receive(self, edge: _Edge, action: PostReceive) -> None:
        await edge.receiver.post(action.piece, action.num_bytes)
        self._dispatch(ReceivePosted(action.peer, action.piece))
        self._dispatch(PieceStaged(action.peer, await edge.receiver.wait(action.piece)))

    async def _scatter(self, edge: _Edge, action: Scatter) -> None:
        try:
            await edge.receiver.scatter(action.staged, action.target_blocks)
        except EdgeError as error:
            self._dispatch(ScatterFailed(action.peer, action.staged.piece, str(error)))
            raise
        self._dispatch(PieceScattered(action.peer, action.staged.piece, action.staged.num_bytes))

    # ---- writers that may outlive their stream -------------------------------------------------

    async def _watch(self, peer: Peer, pid: int) -> None:
        await process_exit(pid)
        del self._watches[peer]
        self._dispatch(WriterGone(peer))

    async def _end_older(self, peer: Peer) -> None:
        """The same process dials again: its older edge is over, and with it that edge's writer."""
        older = self._edges.get(peer)
        if older is not None:
            if not older.broken.done():
                older.broken.set_exception(EdgeError("the prefill worker dialed again"))
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await older.ended.wait()
        watch = self._watches.pop(peer, None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._dispatch(WriterGone(peer))


async def _ready(edge: _Edge, first: asyncio.Future[PrefillToDecode | None]) -> None:
    """Until the receiver is ready. `first`: the peer's next message, which may come before; None: it left.

    Raises:
        EdgeError: it will not be.
        WireError: the stream broke.
    """
    ready = asyncio.ensure_future(edge.receiver.ready())
    try:
        either: set[asyncio.Future[Any]] = {ready, first, edge.broken}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not (ready.done() or edge.broken.done()) and first.result() is not None:
            await asyncio.wait({ready, edge.broken}, return_when=asyncio.FIRST_COMPLETED)
        if edge.broken.done():
            edge.broken.result()
        if not ready.done():
            raise EdgeError("the prefill worker left before the edge was up")
        ready.result()
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)


def _track(tasks: set[asyncio.Task[None]], operation: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(operation)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
