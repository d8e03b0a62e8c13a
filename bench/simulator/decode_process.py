"""A decode worker: the live core, and D's ends of the KV edges (`decode_worker.live_edges`).

Life of an edge here:

1. `EdgeHello` for this epoch: an older edge of the same process is ended first. `EdgeWelcome`, then `EdgeUp`.
2. Staged pieces land in the receive that was posted first, and are scattered when the core says so.
3. The stream ends: scatters finish, then `EdgeDown`. An in-place peer is watched until it is dead or dials
   again: `WriterGone`.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.simulator import inspection
from bench.simulator.network import Endpoint
from bench.simulator.process import Process
from bench.simulator.scenario import BLOCK_BYTES
from bench.simulator.site import Site
from bench.simulator.violation import Violation
from bench.simulator.worker_process import WorkerProcess
from cluster.ids import Epoch, WorkerId
from cluster.kv.edge import Piece, Staged
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome
from cluster.wire.messages import Refused, Role
from cluster.worker_io import (
    Action,
    Discard,
    EdgeDown,
    EdgeUp,
    FromPeer,
    Peer,
    PieceScattered,
    PieceStaged,
    PostReceive,
    ReceivePosted,
    Scatter,
    ToPeer,
    WriterGone,
)
from decode_worker.core import DecodeCore

if TYPE_CHECKING:
    from bench.simulator.prefill_process import PrefillProcess

_RETRY_S = 0.0005  # a new edge waits for the scatters of the older one
_POST_S = 0.0002
_PROOF_S = 0.001  # from a process's death to its proof


class DecodeEdge:
    """D's end of an edge."""

    def __init__(self, owner: DecodeProcess, endpoint: Endpoint, prefill: Process) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.prefill = prefill
        self.peer: Peer | None = None  # None before its EdgeHello
        self.is_closing = False
        self.posted: deque[Piece] = deque()
        self.arriving: deque[list[list[int]]] = deque()
        self.staging: dict[int, list[list[int]]] = {}
        self.num_scatters = 0
        self.num_staged = 0

    def on_message(self, message: Any) -> None:
        if self.peer is not None:
            self.owner.dispatch(FromPeer(self.peer, message))
        else:
            assert isinstance(message, EdgeHello), message
            if (message.decode_worker, message.decode_epoch) != (self.owner.worker, self.owner.epoch):
                self.endpoint.post(Refused(reason="it looks for another worker"))
                self.endpoint.close()
                return
            if message.warm and not self.owner.core.idle:
                self.owner.site.counters["warm dials refused"] += 1
                self.endpoint.post(Refused(reason="it is busy"))
                self.endpoint.close()
                return
            self.owner.on_hello(self, Peer(message.worker, message.epoch))

    def on_closed(self) -> None:
        if self.peer is not None:
            self.owner.end_edge(self)

    def receive(self, contents: list[list[int]]) -> None:
        """The bytes of a piece are under way; they arrive in order."""
        self.arriving.append(contents)
        self.owner.later(self.owner.site.network.delay(), self.owner.arrived, self)


class DecodeProcess(WorkerProcess):
    """One epoch of a decode worker."""

    core: DecodeCore

    def __init__(self, site: Site, worker: WorkerId, epoch: Epoch) -> None:
        super().__init__(site, worker, Role.DECODE, epoch, site.scenario.decode_blocks)
        self.core = DecodeCore(site.scenario.decode, self.blocks)
        self.edges: dict[Peer, DecodeEdge] = {}
        self._watches: dict[Peer, object] = {}

    def accept(self, endpoint: Endpoint, prefill: PrefillProcess) -> None:
        endpoint.handler = DecodeEdge(self, endpoint, prefill)

    def on_hello(self, edge: DecodeEdge, peer: Peer) -> None:
        older = self.edges.get(peer)
        if older is not None:
            older.endpoint.close()
            self.end_edge(older)
            if peer in self.edges:  # a scatter still runs
                self.later(_RETRY_S, self._hello_again, edge, peer)
                return
        if self._watches.pop(peer, None) is not None:
            self.dispatch(WriterGone(peer))
        if not edge.endpoint.is_open:
            return
        edge.peer = peer
        self.edges[peer] = edge
        geometry = self.register().geometry
        welcome = EdgeWelcome(
            worker=self.worker,
            epoch=self.epoch,
            kind="scripted",
            possible=["scripted"],
            geometry=geometry,
            endpoint={},
        )
        edge.endpoint.post(welcome)
        self.dispatch(EdgeUp(peer, in_place=self.site.scenario.in_place))

    def _hello_again(self, edge: DecodeEdge, peer: Peer) -> None:
        if edge.endpoint.is_open:
            self.on_hello(edge, peer)

    def end_edge(self, edge: DecodeEdge) -> None:
        """Tell the core, once the local copies have ended."""
        edge.is_closing = True
        if edge.num_scatters == 0:
            self._edge_ended(edge)

    def _edge_ended(self, edge: DecodeEdge) -> None:
        peer = edge.peer
        assert peer is not None
        if self.edges.get(peer) is not edge:
            return
        del self.edges[peer]
        self.dispatch(EdgeDown(peer, "closed by the prefill worker"))
        if self.site.scenario.in_place:
            watch = self._watches[peer] = object()
            prove = partial(self.later, _PROOF_S, self._proven, peer, watch)
            if edge.prefill.is_alive:
                edge.prefill.on_death.append(prove)
            else:
                prove()

    def _proven(self, peer: Peer, watch: object) -> None:
        if self._watches.get(peer) is watch:
            del self._watches[peer]
            self.dispatch(WriterGone(peer))

    # ---- pieces

    def carry(self, action: Action) -> None:
        match action:
            case ToPeer(peer, message):
                edge = self.edges.get(peer)
                if edge is not None:
                    edge.endpoint.post(message)
            case PostReceive(peer):
                edge = self.edges.get(peer)
                if edge is not None:  # otherwise its EdgeDown answers the action
                    self.later(_POST_S * self._rng.random(), self._posted, edge, action)
            case Scatter(peer, staged):
                edge = self.edges[peer]
                edge.num_scatters += 1
                contents = edge.staging.pop(staged.slot)
                took_s = self.site.scenario.block_s * len(contents)
                self.later(took_s / 2, self._scatter_half, edge, action, contents)
            case Discard(peer, staged):
                edge = self.edges.get(peer)
                if edge is not None:
                    del edge.staging[staged.slot]
            case _:
                raise TypeError(f"not an action of a decode worker: {type(action).__name__}")

    def _posted(self, edge: DecodeEdge, action: PostReceive) -> None:
        if not edge.is_closing:
            edge.posted.append(action.piece)
            self.dispatch(ReceivePosted(action.peer, action.piece))

    def arrived(self, edge: DecodeEdge) -> None:
        """The next piece's bytes are in staging."""
        contents = edge.arriving.popleft()
        if edge.is_closing or edge.peer is None:
            return
        if not edge.posted:
            raise Violation("core", f"{self}: bytes from {edge.peer} for which no receive is posted")
        piece = edge.posted.popleft()
        if piece.num_blocks != len(contents):
            raise Violation("I5", f"{self}: {len(contents)} blocks arrive for {piece}")
        edge.num_staged += 1
        edge.staging[edge.num_staged] = contents
        num_bytes = len(contents) * BLOCK_BYTES
        self.dispatch(PieceStaged(edge.peer, Staged(piece, edge.num_staged, num_bytes)))

    def _scatter_half(self, edge: DecodeEdge, action: Scatter, contents: list[list[int]]) -> None:
        inspection.check_write(self, action.staged.piece, action.target_blocks)
        self.pool.tear(action.target_blocks, contents)
        rest_s = self.site.scenario.block_s * len(contents) / 2
        self.later(rest_s, self._scatter_rest, edge, action, contents)

    def _scatter_rest(self, edge: DecodeEdge, action: Scatter, contents: list[list[int]]) -> None:
        inspection.check_write(self, action.staged.piece, action.target_blocks)
        self.pool.paste(action.target_blocks, contents)
        edge.num_scatters -= 1
        self.dispatch(PieceScattered(action.peer, action.staged.piece, action.staged.num_bytes))
        if edge.is_closing and edge.num_scatters == 0:
            self._edge_ended(edge)
