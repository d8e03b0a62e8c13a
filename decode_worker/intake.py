"""How prompts get into a decode worker: leases on its blocks, and the KV that arrives for them.

Life of a lease (states in `decode_worker.lease`):

1. `reserve`: `decode_worker.admission` takes the blocks → `Grant`, or refuses → `Nack`. A prompt that D
   prefills itself starts at once.
2. `KvOpen` → `KvOpened` names the blocks. In place, `KvPiece` says which of them hold their KV. Staged,
   `KvOffer` → `PostReceive` → `KvReady`, then the bytes are scattered once the lease is checked again.
3. `KvCommit` brings token 0. When it is there and no block is missing, decoding starts (I5): never before.
4. A lease ends early by `Abort`, `Finish`, `RouterLost`, expiry, a newer attempt, or KV that breaks the
   protocol (which fails the attempt). The writer is told (`KvAbort`). Blocks are released when nothing can
   touch them: an in-place writer has promised `KvClosed` or is proven dead (`WriterGone`; a broken edge
   proves nothing), and every posted receive was dropped or lost with its edge. Until then they are used.
5. When a lease ends, the full blocks it got without a gap become cached prefix for the next attempt: at once,
   since a writer writes each block once and these are announced as written. The rest stays in quarantine.

A lost prefill worker ends nothing here: the lease and its complete blocks stay until the router decides.
"""

from __future__ import annotations

from cluster.engine.fence import AttemptFence
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.ids import Attempt, LeaseId, PieceIndex, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece, Staged
from cluster.wire.kv_messages import (
    KvAbort,
    KvClosed,
    KvCommit,
    KvCommitted,
    KvOffer,
    KvOpen,
    KvOpened,
    KvPiece,
    KvReady,
    KvRefused,
    PrefillToDecode,
)
from cluster.wire.messages import Committed, Grant, RenewLeases, Reserve
from cluster.worker_io import Action, Discard, Peer, PostReceive, Scatter, ToPeer, ToRouter
from decode_worker.admission import IntakeConfig, admit, attempt_failed
from decode_worker.lease import Block, Lease, LeaseState, Receive, ReceiveState


class Intake:
    """Owns the leases and their blocks until a sequence starts."""

    def __init__(self, config: IntakeConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._leases: dict[SequenceKey, Lease] = {}  # all that hold blocks
        self._by_id: dict[LeaseId, Lease] = {}
        self._fence = AttemptFence()
        self._live: dict[RequestId, Lease] = {}  # one attempt of a request at a time
        self._edges: dict[Peer, bool] = {}  # edges that are up → in place
        self._num_reserves = 0
        self._started: list[Sequence] = []
        self.num_stale = 0
        self.num_bytes = 0  # KV received

    @property
    def num_live(self) -> int:
        """Leases that wait for KV."""
        return len(self._live)

    @property
    def num_leases(self) -> int:
        """All leases that hold blocks, those on their way out included."""
        return len(self._leases)

    def next_deadline(self) -> float | None:
        return min((lease.expires_s for lease in self._live.values()), default=None)

    def take_started(self) -> list[Sequence]:
        """Sequences that became ready to decode, or to prefill here, since the last call."""
        started, self._started = self._started, []
        return started

    # ---- the router's side

    def reserve(
        self, router: RouterId, message: Reserve, now: float, *, num_running: int, has_preempted: bool
    ) -> list[Action]:
        """Grant or refuse; no older attempt of the request is here. `num_running` sequences run here already,
        `has_preempted`: others wait to get their blocks back."""
        self._num_reserves += 1
        num_here = num_running + len(self._live)
        admitted = admit(
            router,
            message,
            self._blocks,
            self._config,
            self._num_reserves,
            now,
            num_here=num_here,
            has_preempted=has_preempted,
        )
        return [self._grant(admitted, message, now)] if isinstance(admitted, Sequence) else [admitted]

    def is_stale(self, message: Reserve) -> bool:
        """This attempt or a later one was granted before. A refused one may be asked for again."""
        return self._fence.is_stale(message.request, message.attempt)

    def renew(self, router: RouterId, message: RenewLeases, now: float) -> None:
        """Leases that started or ended meanwhile need no renewal: not an error."""
        for lease_id in message.leases:
            lease = self._by_id.get(lease_id)
            if lease is not None and lease.sequence.router == router:
                lease.expires_s = now + lease.ttl_s

    def expire(self, now: float) -> list[Action]:
        """End the leases whose time is over."""
        late = [lease for lease in self._live.values() if now >= lease.expires_s]
        return [
            action
            for lease in late
            for action in self._fail(lease, "lease_expired", "the lease was not renewed in time")
        ]

    def get(self, request: RequestId) -> Lease | None:
        """The live lease of a request."""
        return self._live.get(request)

    def sequences(self) -> tuple[Sequence, ...]:
        """Those of the live leases."""
        return tuple(lease.sequence for lease in self._live.values())

    def end(self, lease: Lease, reason: str) -> list[Action]:
        """The lease is over for the router; its blocks follow as soon as nothing can touch them."""
        lease.move(LeaseState.ENDING)
        del self._live[lease.sequence.request]
        if lease.intact:
            lease.sequence.num_computed = lease.num_leading_tokens(self._blocks.block_size)
            lease.sequence.publish(self._blocks)
        actions = self._abort(lease, reason) if lease.peer_holds else []
        self._settle(lease)
        return actions

    # ---- the prefill worker's side

    def edge_up(self, peer: Peer, in_place: bool) -> list[Action]:
        """Ask about writers that an earlier edge to this peer left open."""
        self._edges[peer] = in_place
        return [
            action
            for lease in self._leases.values()
            if lease.writer == peer and lease.writer_may_write
            for action in self._abort(lease, "the edge was lost")
        ]

    def edge_down(self, peer: Peer) -> None:
        """Receives that were not staged are lost. In place, the writer may go on all the same."""
        self._edges.pop(peer, None)
        for lease in [lease for lease in self._leases.values() if lease.writer == peer]:
            lease.peer_holds = False
            for index, receive in list(lease.receives.items()):
                if receive.state is not ReceiveState.SCATTERING:
                    lease.mark(receive.piece, Block.MISSING)
                    del lease.receives[index]
            self._settle(lease)

    def writer_gone(self, peer: Peer) -> None:
        """The writer's process is dead."""
        for lease in [lease for lease in self._leases.values() if lease.writer == peer]:
            lease.writer_may_write = lease.peer_holds = False
            self._settle(lease)

    def from_peer(self, peer: Peer, message: PrefillToDecode, now: float) -> list[Action]:
        """A message on the KV stream; what fits no lease of this peer is stale."""
        if peer not in self._edges:
            return self._stale()
        match message:
            case KvOpen():
                return self._open(peer, message, now)
            case KvOffer() | KvPiece():
                return self._piece(peer, message)
            case KvCommit(request=request, attempt=attempt):
                lease = self._lease_of(peer, request, attempt)
                if lease is None or lease.state is not LeaseState.RECEIVING or lease.lease != message.lease:
                    return self._stale()
                return self._commit(lease, message, now)
            case KvAbort(request=request, attempt=attempt):
                lease = self._lease_of(peer, request, attempt)
                return [] if lease is not None else self._stale()  # `KvClosed` follows; the router knows
            case KvClosed(request=request, attempt=attempt):
                lease = self._lease_of(peer, request, attempt)
                if lease is None:
                    return self._stale()
                lease.writer_may_write = lease.peer_holds = False
                self._settle(lease)
                return []
            case _:
                return self._stale()

    def posted(self, peer: Peer, piece: Piece) -> list[Action]:
        """The receive is posted, so the peer is to send, even if the lease ended meanwhile: only its bytes
        complete the receive."""
        lease, receive = self._receive(peer, piece, ReceiveState.POSTING)
        if lease is None or receive is None:
            return self._stale()
        receive.state = ReceiveState.POSTED
        ready = KvReady(request=piece.request, attempt=piece.attempt, piece=piece.index)
        return [ToPeer(peer, ready)]

    def staged(self, peer: Peer, staged: Staged) -> list[Action]:
        """The bytes are here: into the pool, if they are still wanted."""
        piece = staged.piece
        lease, receive = self._receive(peer, piece, ReceiveState.POSTED)
        if lease is None or receive is None:
            return [*self._stale(), Discard(peer, staged)]
        if not lease.live:
            del lease.receives[piece.index]
            self._settle(lease)
            return [Discard(peer, staged)]
        receive.state = ReceiveState.SCATTERING
        blocks = lease.sequence.block_ids[piece.first_block : piece.first_block + piece.num_blocks]
        return [Scatter(peer, staged, tuple(blocks))]

    def scattered(self, peer: Peer, piece: Piece, num_bytes: int, now: float) -> list[Action]:
        """The blocks hold their KV."""
        lease, receive = self._receive(peer, piece, ReceiveState.SCATTERING)
        if lease is None or receive is None:
            return self._stale()
        del lease.receives[piece.index]
        self._complete(lease, piece, num_bytes)
        self._settle(lease)
        return self._start_if_complete(lease, now)

    # ---- steps of a lease

    def _grant(self, sequence: Sequence, message: Reserve, now: float) -> Action:
        num_prompt = num_blocks_for(sequence.num_tokens, self._blocks.block_size)
        ttl_s = min(message.lease_ttl_s, self._config.max_ttl_s)
        self._fence.take(sequence.request, sequence.attempt)
        lease = Lease(sequence, LeaseId(sequence.order), ttl_s, now + ttl_s, num_prompt)
        num_cached = sequence.num_computed // self._blocks.block_size
        lease.blocks = [Block.COMPLETE] * num_cached + [Block.MISSING] * (num_prompt - num_cached)
        lease.num_missing = num_prompt - num_cached
        if message.local:
            lease.move(LeaseState.STARTED)
            self._started.append(sequence)
        else:
            assert sequence.request not in self._live, "the older attempt is still live"
            self._leases[sequence.key] = self._by_id[lease.lease] = lease
            self._live[sequence.request] = lease
        grant = Grant(
            request=message.request,
            attempt=message.attempt,
            lease=lease.lease,
            ttl_s=ttl_s,
            cached_tokens=sequence.num_cached,
        )
        return ToRouter(sequence.router, grant)

    def _open(self, peer: Peer, message: KvOpen, now: float) -> list[Action]:
        lease = self._leases.get((message.request, message.attempt))
        if lease is not None and lease.writer == peer:
            return self._stale()  # a duplicate
        if lease is None or lease.state is not LeaseState.RESERVED or lease.lease != message.lease:
            self.num_stale += 1
            return [self._refuse(peer, message.request, message.attempt)]
        lease.move(LeaseState.RECEIVING)
        lease.writer = peer
        lease.writer_may_write = self._edges[peer]
        lease.peer_holds = True
        lease.opened_s = now
        opened = KvOpened(
            request=message.request,
            attempt=message.attempt,
            block_ids=lease.sequence.block_ids[: lease.num_prompt_blocks],
        )
        return [ToPeer(peer, opened)]

    def _piece(self, peer: Peer, message: KvOffer | KvPiece) -> list[Action]:
        piece = Piece(
            message.request, message.attempt, message.piece, message.first_block, message.num_blocks
        )
        lease = self._lease_of(peer, message.request, message.attempt)
        if lease is not None and piece.index < lease.next_piece:
            return self._stale()  # a duplicate
        # An offer waits for an answer: there is no receive for it.
        offered = isinstance(message, KvOffer)
        refusal = [self._refuse(peer, message.request, message.attempt, piece.index)] if offered else []
        if lease is None or lease.state is not LeaseState.RECEIVING:
            self.num_stale += 1
            return refusal
        right_size = message.num_bytes == piece.num_blocks * self._config.block_bytes
        if not lease.accepts(piece) or not right_size or offered is self._edges[peer]:
            reason = f"piece {piece.index} of {message.num_bytes} bytes does not fit what is missing"
            return refusal + self._bad_kv(lease, reason)
        lease.next_piece += 1
        if isinstance(message, KvPiece):
            self._complete(lease, piece, message.num_bytes)
            return []
        lease.mark(piece, Block.ARRIVING)
        lease.receives[piece.index] = Receive(piece)
        return [PostReceive(peer, piece, message.num_bytes)]

    def _commit(self, lease: Lease, message: KvCommit, now: float) -> list[Action]:
        on_their_way = sum(receive.piece.num_blocks for receive in lease.receives.values())
        if message.num_tokens != lease.sequence.num_tokens:
            reason = f"commit of {message.num_tokens} tokens for a prompt of {lease.sequence.num_tokens}"
            return self._bad_kv(lease, reason)
        if lease.num_missing != on_their_way:
            reason = f"commit while {lease.num_missing - on_their_way} blocks are missing"
            return self._bad_kv(lease, reason)
        lease.move(LeaseState.COMMITTING)
        lease.first_token = message.output
        lease.first_token_s = now - message.token_age_s
        lease.writer_may_write = False  # everything is announced, so everything is written
        return self._start_if_complete(lease, now)

    def _start_if_complete(self, lease: Lease, now: float) -> list[Action]:
        if lease.state is not LeaseState.COMMITTING or lease.num_missing:
            return []
        assert lease.first_token is not None
        assert lease.writer is not None
        assert not lease.touched
        sequence = lease.sequence
        sequence.num_computed = sequence.num_tokens
        sequence.publish(self._blocks)
        sequence.append(lease.first_token.token_id)
        sequence.pace.first_token(lease.first_token_s)
        lease.move(LeaseState.STARTED)
        del self._live[sequence.request]
        self._forget(lease)
        self._started.append(sequence)
        request, attempt = sequence.key
        committed = Committed(
            request=request,
            attempt=attempt,
            kv_bytes=lease.kv_bytes,
            kv_transfer_s=now - lease.opened_s,
        )
        actions: list[Action] = [ToRouter(sequence.router, committed)]
        if lease.peer_holds:
            actions.append(ToPeer(lease.writer, KvCommitted(request=request, attempt=attempt)))
        return actions

    def _complete(self, lease: Lease, piece: Piece, num_bytes: int) -> None:
        lease.mark(piece, Block.COMPLETE)
        lease.kv_bytes += num_bytes
        self.num_bytes += num_bytes

    def _bad_kv(self, lease: Lease, reason: str) -> list[Action]:
        lease.intact = False
        return self._fail(lease, "bad_kv", reason)

    def _fail(self, lease: Lease, code: str, reason: str) -> list[Action]:
        failed = attempt_failed(lease.sequence.router, lease.sequence, code, reason)
        return [failed, *self.end(lease, reason)]

    def _abort(self, lease: Lease, reason: str) -> list[Action]:
        assert lease.writer is not None
        request, attempt = lease.sequence.key
        return [ToPeer(lease.writer, KvAbort(request=request, attempt=attempt, reason=reason))]

    def _settle(self, lease: Lease) -> None:
        """Phase two: release the blocks of an ended lease if nothing can touch them any more."""
        if lease.state is not LeaseState.ENDING or lease.touched:
            return
        lease.move(LeaseState.ENDED)
        self._forget(lease)
        if lease.intact:  # pieces may have been scattered since it ended
            lease.sequence.num_computed = lease.num_leading_tokens(self._blocks.block_size)
            lease.sequence.publish(self._blocks)
        lease.sequence.release(self._blocks)

    def _forget(self, lease: Lease) -> None:
        del self._leases[lease.sequence.key]
        del self._by_id[lease.lease]

    # ---- helpers

    def _lease_of(self, peer: Peer, request: RequestId, attempt: Attempt) -> Lease | None:
        lease = self._leases.get((request, attempt))
        return lease if lease is not None and lease.writer == peer else None

    def _receive(
        self, peer: Peer, piece: Piece, state: ReceiveState
    ) -> tuple[Lease, Receive] | tuple[None, None]:
        """The lease and the receive of a piece that is in this state."""
        lease = self._lease_of(peer, piece.request, piece.attempt)
        receive = lease.receives.get(piece.index) if lease is not None else None
        if lease is None or receive is None or receive.state is not state:
            return None, None
        return lease, receive

    def _refuse(
        self, peer: Peer, request: RequestId, attempt: Attempt, piece: PieceIndex | None = None
    ) -> Action:
        refused = KvRefused(request=request, attempt=attempt, reason="no lease for this attempt", piece=piece)
        return ToPeer(peer, refused)

    def _stale(self) -> list[Action]:
        self.num_stale += 1
        return []
