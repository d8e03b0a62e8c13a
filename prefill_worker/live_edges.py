"""P's live KV side: one stream and one sender per decode worker it ships to.

1. `OpenEdge`: dial D's KV address, `EdgeHello`, `EdgeWelcome`; build the sender from its endpoint; `EdgeUp`.
   If no edge of that kind can join the two, it is dialled again at once, and the hello names another kind.
   All of it has one deadline: whoever waits for the edge waits for one dial.
2. `ToPeer` posts a control message; `SendPiece` moves bytes, one send at a time per edge, then `PieceSent`.
3. Whatever breaks (stream, sender, handshake) ends the edge once: the sender is closed first, so that
   nothing of it writes any more, then `EdgeDown`. A later `OpenEdge` builds a new one.
4. A sender that writes in place and does not stop in time may write yet: that worker is not dialed again,
   since D takes a dial for proof that it has stopped. D keeps the blocks until this process has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from cluster.errors import EdgeCrowded, EdgeDeviceLost, EdgeError, EdgeUnfit, ProtocolError, WireError
from cluster.kv.edge import KVSender
from cluster.wire.kv_messages import DecodeToPrefill, EdgeHello, EdgeWelcome
from cluster.wire.messages import Refused
from cluster.wire.stream import Stream, connect
from cluster.worker_io import (
    Action,
    CloseEdge,
    EdgeDown,
    EdgeUp,
    Event,
    FromPeer,
    OpenEdge,
    Peer,
    PieceSent,
    SendPiece,
    ToPeer,
)

logger = logging.getLogger(__name__)

MakeSender = Callable[[EdgeWelcome], Awaitable[KVSender]]

DIAL_TIMEOUT_S = 10.0
_TOO_LATE = "the edge did not come up in time"


class _NotNow(EdgeError):
    """An edge that nobody needs yet is refused: that says nothing of its kind."""


@dataclass(slots=True)
class _Edge:
    """One dialed decode worker. `sends` is what its task works off; `broken` ends it from outside."""

    sends: asyncio.Queue[SendPiece]
    broken: asyncio.Future[None]
    is_warm: bool  # no request needs it yet
    uncapped: bool
    due_s: float  # until when it is to be up, by the loop's clock
    task: asyncio.Task[None] | None = None
    stream: Stream[DecodeToPrefill] | None = None


class PrefillEdges:
    """Owns every KV stream and sender of one prefill worker."""

    def __init__(
        self,
        *,
        make_hello: Callable[[Peer, bool], EdgeHello],
        token: bytes,
        make_sender: MakeSender,
        dispatch: Callable[[Event], None],
        judge: Callable[[Peer, EdgeError], EdgeError] = lambda _, error: error,
        describe: Callable[[Peer, KVSender], EdgeUp] = lambda peer, sender: EdgeUp(peer, sender.in_place),
        on_device_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`make_hello` takes whether the edge is to be of a kind that is not capped; `judge` says what a
        failed handshake means: `EdgeUnfit` if it is to be tried again at once; `describe`: an
        edge that came up, for the core."""
        self._describe = describe
        self._judge, self._on_device_lost = judge, on_device_lost
        self._make_hello = make_hello
        self._token = token
        self._make_sender = make_sender
        self._dispatch = dispatch
        self._edges: dict[Peer, _Edge] = {}
        self._unstopped: set[Peer] = set()  # whom an older sender may still write to
        self._closing = False

    def carry(self, action: Action) -> None:
        """Start what the core decided; the outcome comes back as an event, never synchronously."""
        match action:
            case OpenEdge(peer, address, warm, timeout_s, uncapped):
                if peer not in self._edges and not self._closing:
                    loop = asyncio.get_running_loop()
                    due_s = loop.time() + (DIAL_TIMEOUT_S if timeout_s is None else timeout_s)
                    edge = _Edge(asyncio.Queue(), loop.create_future(), warm, uncapped, due_s)
                    self._edges[peer] = edge
                    edge.task = asyncio.create_task(self._live(peer, address, edge))
            case CloseEdge(peer, reason):
                closing = self._edges.get(peer)
                if closing is not None and not closing.broken.done():
                    closing.broken.set_exception(EdgeError(reason))
            case ToPeer(peer, message):
                stream = self._stream(peer)
                if stream is not None:
                    stream.post(message)
            case SendPiece(peer):
                target = self._edges.get(peer)
                if target is not None:  # otherwise its EdgeDown answers the action
                    target.sends.put_nowait(action)
            case _:
                raise TypeError(f"not an action of a prefill worker: {type(action).__name__}")

    async def close(self) -> None:
        """End every edge; on return nothing writes into any decode worker's pool."""
        self._closing = True
        tasks = [edge.task for edge in self._edges.values() if edge.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(self, peer: Peer) -> Stream[DecodeToPrefill] | None:
        edge = self._edges.get(peer)
        return None if edge is None else edge.stream

    async def _live(self, peer: Peer, address: str, edge: _Edge) -> None:
        """The edge from dialing to its end."""
        reason: str | None = None
        is_crowded = False
        while reason is None:
            try:
                await self._dial(peer, address, edge)
                reason = "closed by the decode worker"
            except EdgeUnfit as error:  # the next dial is another kind, and there are only so many
                logger.warning("KV edge to `%s` epoch %d: %s", peer.worker, peer.epoch, error)
                if asyncio.get_running_loop().time() >= edge.due_s:
                    reason = f"{error}; there was no time left for that"
            except (EdgeError, WireError, OSError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
                is_crowded = isinstance(error, EdgeCrowded)
                level = logging.INFO if edge.is_warm else logging.WARNING
                level = logging.DEBUG if isinstance(error, _NotNow) else level  # once a minute, for ever
                logger.log(level, "KV edge to `%s` epoch %d: %s", peer.worker, peer.epoch, reason)
                if isinstance(error, EdgeDeviceLost):
                    self._on_device_lost(reason)
        del self._edges[peer]
        if not self._closing:
            self._dispatch(EdgeDown(peer, reason, is_crowded))

    async def _dial(self, peer: Peer, address: str, edge: _Edge) -> None:
        """The edge as one kind; returns when D closes it.

        Raises:
            EdgeUnfit: it cannot be of this kind; nothing was sent over it.
            EdgeError, WireError, OSError, TimeoutError: it is lost.
        """
        if peer in self._unstopped:
            raise EdgeError("an older edge has not stopped writing: this worker has to be started again")
        left_s = max(0.0, edge.due_s - asyncio.get_running_loop().time())
        stream: Stream[DecodeToPrefill] = await connect(
            address, self._token, DecodeToPrefill, timeout_s=left_s
        )
        try:
            try:
                sender = await self._shake_hands(peer, stream, edge)
            except _NotNow:
                raise
            except (EdgeError, TimeoutError) as error:
                told = error if isinstance(error, EdgeError) else EdgeError(_TOO_LATE)
                raise self._judge(peer, told) from error
            try:
                edge.stream, edge.is_warm = stream, False
                self._dispatch(self._describe(peer, sender))
                await self._serve(peer, stream, sender, edge)
            finally:
                edge.stream = None
                await self._stop(peer, sender)
        finally:
            await stream.close()

    async def _stop(self, peer: Peer, sender: KVSender) -> None:
        if sender.in_place:
            self._unstopped.add(peer)
        await sender.close()
        self._unstopped.discard(peer)

    async def _shake_hands(self, peer: Peer, stream: Stream[DecodeToPrefill], edge: _Edge) -> KVSender:
        stream.post(msgspec.structs.replace(self._make_hello(peer, edge.uncapped), warm=edge.is_warm))
        async with asyncio.timeout_at(edge.due_s):
            welcome = await anext(aiter(stream), None)
            if isinstance(welcome, Refused):
                refusal = _NotNow if edge.is_warm else EdgeError
                raise refusal(f"refused by the decode worker: {welcome.reason}")
            if not isinstance(welcome, EdgeWelcome):
                raise ProtocolError(f"expected EdgeWelcome, got {type(welcome).__name__}")
            if (welcome.worker, welcome.epoch) != (peer.worker, peer.epoch):
                raise EdgeError(
                    f"another worker answers at this address: `{welcome.worker}` epoch {welcome.epoch}"
                )
            return await self._make_sender(welcome)

    async def _serve(
        self, peer: Peer, stream: Stream[DecodeToPrefill], sender: KVSender, edge: _Edge
    ) -> None:
        """Messages in, pieces out, until either ends."""

        async def read() -> None:
            async for message in stream:
                self._dispatch(FromPeer(peer, message))

        async def send() -> None:
            while True:
                action = await edge.sends.get()
                num_bytes = await sender.send(action.piece, action.source_blocks, action.target_blocks)
                self._dispatch(PieceSent(peer, action.piece, num_bytes))

        ends = (asyncio.create_task(read()), asyncio.create_task(send()), edge.broken)
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
