"""What decode workers and the edges to them say to a prefill worker, applied to the attempts it concerns.

1. `dial_for` makes sure that the edge of a new attempt is up or dialled; `edge_up` opens what waited for it.
   `warm_up` dials one for nobody yet.
2. `from_peer` leads each attempt's hand-off on: opened, ready for a piece, committed.
3. An edge that nobody uses is exchanged for a better one when that may be tried (`prefill_worker.edges`).
4. `edge_down`, a refusal, D's `KvAbort` and a deadline that passed fail the attempts they concern. The
   router is told; D too, unless it said so itself or cannot be reached.

What fits no attempt of that peer is stale: dropped and counted. A `KvAbort` is answered by `KvClosed` even
then, because D may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.clock import soonest
from cluster.kv.edge import Piece
from cluster.wire.kv_messages import (
    DecodeToPrefill,
    KvAbort,
    KvClosed,
    KvCommitted,
    KvMakeRoom,
    KvOpened,
    KvReady,
    KvRefused,
    PrefillToDecode,
)
from cluster.worker_io import Action, EdgeDown, EdgeUp, Peer, ToPeer
from prefill_worker.attempts import AttemptTable, PrefillAttempt
from prefill_worker.edges import EdgeBook
from prefill_worker.handoff import HandoffState
from prefill_worker.warming import Warming


class Transfers:
    """Joins the attempts and the edges."""

    def __init__(self, attempts: AttemptTable, warming: Warming) -> None:
        self._attempts = attempts
        self._warming = warming
        self._edges = EdgeBook()
        self.num_stale = 0
        self.num_bytes = 0  # KV sent

    def note_sent(self, actions: list[Action]) -> None:
        """What the core is about to say to decode workers."""
        for action in actions:
            if isinstance(action, ToPeer) and isinstance(action.message, KvClosed):
                self._edges.told_closed(action.peer)

    def next_deadline(self) -> float | None:
        return soonest(self._attempts.next_deadline(), self._edges.next_redial())

    def warm_up(self, now: float) -> list[Action]:
        """Nobody needs this worker: dial the next edge that it should have, one at a time."""
        found = None if self._edges.is_warming else self._warming.next_dial(now, self._edges.has)
        return [] if found is None else self._edges.warm(*found)

    def next_better(self) -> float | None:
        """When an edge may be exchanged for a better one."""
        return self._edges.next_better()

    def next_warm_up(self) -> float | None:
        """When `warm_up` is to be tried again, if nothing happens before."""
        return None if self._edges.is_warming else self._warming.next_try(self._edges.has)

    def dial_for(self, attempt: PrefillAttempt, address: str, now: float) -> list[Action]:
        """Open the new attempt at its decode worker, now or once the edge is up."""
        peer = attempt.handoff.peer
        in_place = self._edges.in_place(peer)
        self._edges.used(peer, now)
        if in_place is None:
            return self._edges.dial(peer, address)
        return attempt.handoff.edge_up(in_place, now)

    def edge_up(self, event: EdgeUp, now: float) -> list[Action]:
        peer, in_place = event.peer, event.in_place
        self._edges.up(event, now)
        self._warming.up(peer)
        return [
            action
            for attempt in self._attempts.on_edge(peer)
            if attempt.handoff.state is HandoffState.DIALING
            for action in attempt.handoff.edge_up(in_place, now)
        ]

    def edge_down(self, event: EdgeDown, now: float) -> list[Action]:
        peer, reason = event.peer, event.reason
        on_edge = self._attempts.on_edge(peer)
        left_s = self._patience_s(peer, now)
        if (gone := self._edges.let_go(peer)) is not None:
            address, heir = gone
            actions = [] if heir is None else self._edges.inherit(heir, self._patience_s(heir, now))
            return actions + (self._edges.dial(peer, address, left_s) if left_s > 0 else [])
        is_needed = left_s > 0
        if event.is_crowded and is_needed and (actions := self._edges.make_room(peer, left_s, self._in_use)):
            return actions
        if is_needed and (actions := self._edges.dial_for_waiting(peer, left_s)):
            return actions
        self._warming.down(peer, now)
        left_open = any(attempt.handoff.may_write for attempt in on_edge)
        self._edges.down(peer, now, redial=left_open)
        actions = []
        for attempt in on_edge:
            attempt.handoff.edge_down()
            message = f"the KV edge to {peer.worker} broke: {reason}"
            actions += self._attempts.fail(attempt, "edge_lost", message, now)
        return actions

    def sent(self, peer: Peer, piece: Piece, num_bytes: int, now: float) -> list[Action]:
        self.num_bytes += num_bytes
        self._edges.used(peer, now)
        attempt = self._attempts.with_peer(peer, (piece.request, piece.attempt))
        return self._reply(attempt, lambda a: a.handoff.sent(piece, num_bytes, now))

    def tick(self, now: float) -> list[Action]:
        """Dial again what is due, and stop waiting for decode workers that do not answer."""
        actions = self._edges.redial(now) + self._edges.make_better(now, self._in_use)
        for attempt in self._attempts:
            handoff = attempt.handoff
            if handoff.deadline is None or now < handoff.deadline:
                continue
            if attempt.over:
                actions += handoff.unresponsive()
            else:
                message = f"no answer from {handoff.peer.worker} while {handoff.state.name}"
                actions += self._attempts.fail(attempt, "peer_silent", message, now)
        return actions

    def from_peer(self, peer: Peer, message: PrefillToDecode | DecodeToPrefill, now: float) -> list[Action]:
        """A message on the KV stream, after its handshake."""
        self._edges.used(peer, now)
        match message:
            case KvOpened(request=request, attempt=number, block_ids=block_ids):
                attempt = self._attempts.with_peer(peer, (request, number))
                actions = self._reply(attempt, lambda a: a.handoff.opened(block_ids))
                if attempt is not None and attempt.handoff.state is HandoffState.STREAMING:
                    if not attempt.handoff.target_fits:
                        reason = f"the decode worker opened {len(block_ids)} blocks: the prompt takes others"
                        return actions + self._attempts.fail(attempt, "kv_mismatch", reason, now)
                    return actions + attempt.handoff.settle(now)
                return actions
            case KvReady(request=request, attempt=number, piece=index):
                attempt = self._attempts.with_peer(peer, (request, number))
                return self._reply(attempt, lambda a: a.handoff.ready(index, now))
            case KvCommitted(request=request, attempt=number):
                attempt = self._attempts.with_peer(peer, (request, number))
                actions = self._reply(attempt, lambda a: a.handoff.committed())
                if attempt is not None and attempt.handoff.state is HandoffState.CLOSED:
                    actions += self._attempts.end(attempt, "committed", now)
                return actions
            case KvMakeRoom():
                return [] if self._in_use(peer) else self._edges.give_way(peer)
            case KvRefused():
                return self._refused(peer, message, now)
            case KvAbort(request=request, attempt=number, reason=reason):
                attempt = self._attempts.with_peer(peer, (request, number))
                if attempt is None:  # it may have ended before this edge came up: D still needs to know
                    self.num_stale += 1
                    return [ToPeer(peer, KvClosed(request=request, attempt=number))]
                message_text = f"the decode worker ended the transfer: {reason}"
                return self._attempts.fail(attempt, "kv_aborted", message_text, now, tell=False)
            case _:
                return self._stale()

    def _patience_s(self, peer: Peer, now: float) -> float:
        """How long attempts will wait yet for this edge to come up; 0: none does."""
        handoffs = [attempt.handoff for attempt in self._attempts.on_edge(peer)]
        deadlines = [one.deadline for one in handoffs if one.state is HandoffState.DIALING]
        return max((deadline - now for deadline in deadlines if deadline is not None), default=0.0)

    def _in_use(self, peer: Peer) -> bool:
        return bool(self._attempts.on_edge(peer))

    def _refused(self, peer: Peer, message: KvRefused, now: float) -> list[Action]:
        attempt = self._attempts.with_peer(peer, (message.request, message.attempt))
        if attempt is None:
            return self._stale()
        handoff, actions = attempt.handoff, list[Action]()
        if message.piece is None:
            if handoff.state is not HandoffState.OPENING:
                return self._stale()
            actions += handoff.refused()
        else:
            if not handoff.offer_refused(message.piece):
                return self._stale()
            actions += handoff.settle(now)
        reason = f"the decode worker refused: {message.reason}"
        return actions + self._attempts.fail(attempt, "lease_lost", reason, now)

    def _reply(
        self, attempt: PrefillAttempt | None, move: Callable[[PrefillAttempt], list[Action] | None]
    ) -> list[Action]:
        """Apply a hand-off move; what the hand-off does not expect is stale."""
        actions = move(attempt) if attempt is not None else None
        if attempt is None or actions is None:
            return self._stale()
        self._attempts.settle(attempt)
        return actions

    def _stale(self) -> list[Action]:
        self.num_stale += 1
        return []
