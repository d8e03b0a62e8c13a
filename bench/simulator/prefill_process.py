"""A prefill worker: the live core, and P's ends of the KV edges (`prefill_worker.live_edges`).

Life of an edge here:

1. `OpenEdge` dials; `EdgeHello`, `EdgeWelcome`, then `EdgeUp`.
2. Pieces go one at a time. In place, P writes into D's memory itself, the first half, then the rest: stopped
   in the middle it goes on writing when it is continued, whatever D has decided meanwhile. Staged, the bytes
   are read while they leave, and land in D's staging.
3. Whatever ends the edge, the sender stops first, then `EdgeDown`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from bench.simulator import inspection
from bench.simulator.network import Endpoint
from bench.simulator.scenario import BLOCK_BYTES
from bench.simulator.site import Site
from bench.simulator.violation import Violation
from bench.simulator.worker_process import FINGERPRINT, WorkerProcess
from cluster.ids import Epoch, WorkerId
from cluster.wire.kv_messages import EdgeHello, EdgeWelcome
from cluster.wire.messages import Refused, Role
from cluster.worker_io import (
    Action,
    CloseEdge,
    EdgeDown,
    EdgeUp,
    FromPeer,
    OpenEdge,
    Peer,
    PieceSent,
    SendPiece,
    ToPeer,
)
from prefill_worker.core import PrefillCore

if TYPE_CHECKING:
    from bench.simulator.decode_process import DecodeEdge, DecodeProcess

HANDSHAKE_TIMEOUT_S = 10.0
_STOP_S = 0.002  # within this time a copy that is told to stop has stopped


class PrefillEdge:
    """P's end of an edge, from the dial to its end."""

    def __init__(self, owner: PrefillProcess, peer: Peer, is_warm: bool) -> None:
        self.owner = owner
        self.peer = peer
        self.is_warm = is_warm
        self.endpoint: Endpoint | None = None
        self.is_up = False
        self.is_closing = False
        self.is_down = False
        self.is_sending = False
        self.sends: deque[SendPiece] = deque()
        self.slowness = 1.0
        self.timeout_s = HANDSHAKE_TIMEOUT_S

    @property
    def decode(self) -> DecodeProcess:
        assert self.endpoint is not None
        return cast("DecodeProcess", self.endpoint.peer.process)

    def on_message(self, message: Any) -> None:
        if self.is_up:
            self.owner.dispatch(FromPeer(self.peer, message))
        elif isinstance(message, Refused):
            self.owner.end_edge(self, f"refused by the decode worker: {message.reason}")
        else:
            assert isinstance(message, EdgeWelcome), message
            if (message.worker, message.epoch) != (self.peer.worker, self.peer.epoch):
                self.owner.end_edge(self, "another worker answers at this address")
                return
            self.is_up = True
            self.owner.dispatch(EdgeUp(self.peer, in_place=self.owner.site.scenario.in_place))

    def on_closed(self) -> None:
        self.owner.end_edge(self, "closed by the decode worker")


class PrefillProcess(WorkerProcess):
    """One epoch of a prefill worker."""

    core: PrefillCore

    def __init__(self, site: Site, worker: WorkerId, epoch: Epoch) -> None:
        super().__init__(site, worker, Role.PREFILL, epoch, site.scenario.prefill_blocks)
        self.core = PrefillCore(replace(site.scenario.prefill, worker=worker), self.blocks)
        self.edges: dict[Peer, PrefillEdge] = {}

    def carry(self, action: Action) -> None:
        match action:
            case ToPeer(peer, message):
                edge = self.edges.get(peer)
                if edge is not None and edge.is_up and edge.endpoint is not None:
                    edge.endpoint.post(message)
            case SendPiece(peer):
                edge = self.edges.get(peer)
                if edge is not None:  # otherwise its EdgeDown answers the action
                    edge.sends.append(action)
                    self._send_next(edge)
            case OpenEdge(peer, address, warm, timeout_s):
                if peer not in self.edges:
                    if warm:
                        self.site.counters["warm dials"] += 1
                    edge = self.edges[peer] = PrefillEdge(self, peer, warm)
                    edge.timeout_s = HANDSHAKE_TIMEOUT_S if timeout_s is None else timeout_s
                    self.later(self.site.network.delay(), self._edge_dialled, edge, WorkerId(address))
            case CloseEdge(peer, reason):
                edge = self.edges.get(peer)
                if edge is not None:
                    self.end_edge(edge, reason)
            case _:
                raise TypeError(f"not an action of a prefill worker: {type(action).__name__}")

    def end_edge(self, edge: PrefillEdge, reason: str) -> None:
        """Close it; `EdgeDown` follows once nothing of it writes any more."""
        if edge.is_closing:
            return
        edge.is_closing = True
        if edge.endpoint is not None:
            edge.endpoint.close()
        self.later(self._rng.random() * _STOP_S, self._edge_ended, edge, reason)

    def _edge_ended(self, edge: PrefillEdge, reason: str) -> None:
        edge.is_down = True
        del self.edges[edge.peer]
        self.dispatch(EdgeDown(edge.peer, reason))

    def _edge_dialled(self, edge: PrefillEdge, address: WorkerId) -> None:
        listener = self.site.workers[address]
        if not listener.is_alive:
            self.end_edge(edge, "connection refused")
            return
        edge.endpoint, far = self.site.network.kv_stream(self, listener)
        edge.endpoint.handler = edge
        cast("DecodeProcess", listener).accept(far, self)
        edge.endpoint.post(
            EdgeHello(
                worker=self.worker,
                epoch=self.epoch,
                decode_worker=edge.peer.worker,
                decode_epoch=edge.peer.epoch,
                pid=self.epoch,
                fingerprint=FINGERPRINT,
                kinds=["scripted"],
                place="",
                geometry=self.register().geometry,
                warm=edge.is_warm,
            )
        )
        self.later(edge.timeout_s, self._give_up_dial, edge)

    def _give_up_dial(self, edge: PrefillEdge) -> None:
        if not edge.is_up and not edge.is_down:
            self.end_edge(edge, "no EdgeWelcome in time")

    # ---- pieces

    def _send_next(self, edge: PrefillEdge) -> None:
        if edge.is_sending or edge.is_closing or not edge.sends:
            return
        edge.is_sending = True
        action = edge.sends.popleft()
        self.site.counters["pieces"] += 1
        took_s = self.site.scenario.block_s * action.piece.num_blocks * edge.slowness
        if self.site.scenario.in_place:
            self.later(took_s / 2, self._write_half, edge, action, took_s / 2)
        else:
            self.later(took_s, self._send_rest, edge, action, self.pool.copy(action.source_blocks))

    def _write_half(self, edge: PrefillEdge, action: SendPiece, rest_s: float) -> None:
        if edge.is_down or (edge.is_closing and self._rng.random() < 0.5):
            return
        inspection.check_write(edge.decode, action.piece, action.target_blocks)
        edge.decode.pool.tear(action.target_blocks, self._read(action))
        self.later(rest_s, self._write_rest, edge, action)

    def _write_rest(self, edge: PrefillEdge, action: SendPiece) -> None:
        if edge.is_down or edge.is_closing:
            return
        inspection.check_write(edge.decode, action.piece, action.target_blocks)
        edge.decode.pool.paste(action.target_blocks, self._read(action))
        self._sent(edge, action)

    def _send_rest(self, edge: PrefillEdge, action: SendPiece, early: list[list[int]]) -> None:
        """The second half of the bytes is read at the end."""
        assert edge.endpoint is not None
        if edge.is_down or edge.is_closing or edge.endpoint.is_cut:
            return
        half = len(early) // 2
        contents = early[:half] + self._read(action)[half:]
        cast("DecodeEdge", edge.endpoint.peer.handler).receive(contents)
        self._sent(edge, action)

    def _read(self, action: SendPiece) -> list[list[int]]:
        for block_id in action.source_blocks:
            if inspection.references(self.blocks, block_id) == 0:
                raise Violation("I7", f"{self}: block {block_id} was freed while {action.piece} is sent")
        return self.pool.copy(action.source_blocks)

    def _sent(self, edge: PrefillEdge, action: SendPiece) -> None:
        self.site.log.note(self, "piece sent")
        edge.is_sending = False
        self.dispatch(PieceSent(edge.peer, action.piece, action.piece.num_blocks * BLOCK_BYTES))
        self._send_next(edge)
