"""How KV gets into a decode worker: what prefill workers say about it, and what becomes of its bytes.

1. `KvOpen` → `KvOpened` names the blocks. In place, `KvPiece` says which of them hold their KV. Staged,
   `KvOffer` → `PostReceive` → `KvReady`, then the bytes are scattered once the lease is checked again.
2. `KvCommit` brings token 0. When it is there and no block is missing, decoding starts (I5): never before.
3. KV that breaks the protocol fails the attempt.
4. Only who can no longer touch a block lets go of it: an in-place writer has promised `KvClosed` or is
   proven dead (`writer_gone`; a broken edge proves nothing), a receive was dropped or lost with its edge.

Which leases there are, and when they end, is `decode_worker.lease_table`'s; their states are in
`decode_worker.lease`. A lost prefill worker ends nothing here: the lease and its complete blocks stay until
the router decides.
"""

from __future__ import annotations

from cluster.ids import Attempt, PieceIndex, RequestId
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
from cluster.wire.messages import Committed
from cluster.worker_io import Action, Discard, Peer, PostReceive, Scatter, ToPeer, ToRouter
from decode_worker.admission import IntakeConfig
from decode_worker.lease import Block, Lease, LeaseState, Receive, ReceiveState
from decode_worker.lease_table import LeaseTable, ask_to_stop


class Intake:
    """Fills the leases of a table with their KV. Owns which edges are up."""

    def __init__(self, config: IntakeConfig, blocks: BlockManager, leases: LeaseTable) -> None:
        self._config = config
        self._blocks = blocks
        self._leases = leases
        self._edges: dict[Peer, bool] = {}  # edges that are up → in place
        self.num_stale = 0
        self.num_bytes = 0  # KV received

    # ---- the prefill worker's side

    def edge_up(self, peer: Peer, in_place: bool) -> list[Action]:
        """Ask about writers that an earlier edge to this peer left open."""
        self._edges[peer] = in_place
        return [
            action
            for lease in self._leases.written_by(peer)
            if lease.writer_may_write
            for action in ask_to_stop(lease, "the edge was lost")
        ]

    def edge_down(self, peer: Peer) -> None:
        """Receives that were not staged are lost. In place, the writer may go on all the same."""
        self._edges.pop(peer, None)
        for lease in self._leases.written_by(peer):
            lease.peer_holds = False
            for index, receive in list(lease.receives.items()):
                if receive.state is not ReceiveState.SCATTERING:
                    lease.mark(receive.piece, Block.MISSING)
                    del lease.receives[index]
            self._leases.settle(lease)

    def writer_gone(self, peer: Peer) -> None:
        """The writer's process is dead."""
        for lease in self._leases.written_by(peer):
            lease.writer_may_write = lease.peer_holds = False
            self._leases.settle(lease)

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
                self._leases.settle(lease)
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
            self._leases.settle(lease)
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
        self._leases.settle(lease)
        return self._start_if_complete(lease, now)

    def scatter_failed(self, peer: Peer, piece: Piece, reason: str) -> list[Action]:
        """The blocks hold anything, and nothing writes into them any more."""
        lease, receive = self._receive(peer, piece, ReceiveState.SCATTERING)
        if lease is None or receive is None:
            return self._stale()
        del lease.receives[piece.index]
        lease.mark(piece, Block.MISSING)
        if lease.live:
            return self._leases.fail(lease, "kv_lost", f"KV that had arrived was lost: {reason}")
        self._leases.settle(lease)
        return []

    # ---- steps of a lease

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
        self._leases.start(lease)
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
        return self._leases.fail(lease, "bad_kv", reason)

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
