"""The passing of one attempt's KV to its decode worker: what is said and sent, and when it is over.

Life of a hand-off:

1. DIALING: the edge to D is not up yet. The prompt may be computed meanwhile.
2. OPENING: `KvOpen` is sent. D answers with its blocks for the whole prompt (`opened`), or refuses.
3. STREAMING: `next_piece` cuts finished blocks past `skip_tokens` into pieces, in order; cached ones at once,
   full ones after each chunk, the partial last one when the prompt is complete. In place: `SendPiece`,
   then `KvPiece` once it is sent. Staged: `KvOffer`, and `SendPiece` when D is ready.
4. COMMITTING: every piece is announced and token 0 is sampled: `KvCommit` is sent. D's `KvCommitted` ends it.
5. CLOSING: the attempt is over before that, but something may still be written or read: sends in flight,
   and offers D has not answered (D may have posted a receive, which only our bytes can complete).
6. CLOSED: nothing of this attempt is written or read any more. If D's blocks were open, `KvClosed` said so.

Every wait for D has a deadline of `peer_timeout_s`: the attempt fails then. A D that leaves an offer without
answer even after that holds up the edge for everyone: the edge is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cluster.engine.sequence import Sequence as PromptSequence
from cluster.engine.sequence import num_blocks_for
from cluster.errors import BatonError
from cluster.ids import BlockId, LeaseId, PieceIndex
from cluster.kv.edge import Piece
from cluster.sampling import TokenOutput
from cluster.wire.kv_messages import KvAbort, KvClosed, KvCommit, KvOffer, KvOpen, KvPiece
from cluster.worker_io import Action, CloseEdge, Peer, SendPiece, ToPeer


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """`block_bytes` of KV per block as the edge moves it; a piece has one block or `max_piece_bytes`."""

    block_size: int
    block_bytes: int
    max_piece_bytes: int = 8 * 1024 * 1024
    peer_timeout_s: float = 10.0

    @property
    def max_piece_blocks(self) -> int:
        return max(1, self.max_piece_bytes // self.block_bytes)


class HandoffState(Enum):
    """See the module."""

    DIALING = auto()
    OPENING = auto()
    STREAMING = auto()
    COMMITTING = auto()
    CLOSING = auto()
    CLOSED = auto()

    __hash__ = object.__hash__  # an enum's own is Python; `TRANSITIONS` is asked at every move


_S = HandoffState
TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    _S.DIALING: frozenset({_S.OPENING, _S.CLOSED}),
    _S.OPENING: frozenset({_S.STREAMING, _S.CLOSING, _S.CLOSED}),
    _S.STREAMING: frozenset({_S.COMMITTING, _S.CLOSING, _S.CLOSED}),
    _S.COMMITTING: frozenset({_S.CLOSING, _S.CLOSED}),
    _S.CLOSING: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}


class IllegalHandoff(BatonError):
    """A bug of ours: the hand-off was asked for a move that is not in the table."""


class Handoff:
    """One attempt's hand-off. Reads its sequence's blocks and progress, never changes them.

    Methods return the actions they cause; what arrives for the wrong state returns None and changes
    nothing: the caller counts it as stale.
    """

    def __init__(
        self,
        config: HandoffConfig,
        sequence: PromptSequence,
        peer: Peer,
        lease: LeaseId,
        skip_tokens: int,
        now: float,
    ) -> None:
        self._config = config
        self._sequence = sequence
        self._lease = lease
        self._target_blocks: Sequence[BlockId] = ()
        self._next_block = skip_tokens // config.block_size  # first block not yet in a piece
        self._num_blocks = num_blocks_for(sequence.num_tokens, config.block_size)
        self._num_pieces = 0
        self._offered: dict[PieceIndex, Piece] = {}  # announced to D, not answered
        self._sending: dict[PieceIndex, Piece] = {}
        self._in_place = False
        self._first_token: TokenOutput | None = None
        self._sampled_s = 0.0
        self.peer = peer
        self.state = HandoffState.DIALING
        self.deadline: float | None = now + config.peer_timeout_s

    @property
    def num_in_flight(self) -> int:
        """Pieces begun and not through."""
        return len(self._offered) + len(self._sending)

    @property
    def may_write(self) -> bool:
        """D's blocks are open to us for writing in place: D must be told when that is over."""
        return self._in_place and self.state not in (HandoffState.DIALING, HandoffState.CLOSED)

    def edge_up(self, in_place: bool, now: float) -> list[Action]:
        """The edge is there: ask D for its blocks."""
        self._in_place = in_place
        self._move(HandoffState.OPENING)
        self.deadline = now + self._config.peer_timeout_s
        request, attempt = self._sequence.key
        return [ToPeer(self.peer, KvOpen(request=request, attempt=attempt, lease=self._lease))]

    def opened(self, block_ids: Sequence[BlockId]) -> list[Action] | None:
        """`KvOpened`. `target_fits` then says whether these can be the right blocks."""
        if self.state is not HandoffState.OPENING:
            return None
        self._move(HandoffState.STREAMING)
        self._target_blocks = block_ids
        self.deadline = None
        return []

    @property
    def target_fits(self) -> bool:
        """D granted exactly the blocks that the prompt takes."""
        return len(self._target_blocks) == self._num_blocks

    def has_piece(self) -> bool:
        """Blocks are finished that are in no piece yet, and may go."""
        return self.state is HandoffState.STREAMING and self._next_block < self._num_finished()

    def _num_finished(self) -> int:
        """Blocks whose KV is computed; the last one, which may be partial, with the prompt."""
        sequence = self._sequence
        if not sequence.block_ids:
            return 0
        num_computed = sequence.num_computed
        is_complete = num_computed == len(sequence.token_ids)
        return self._num_blocks if is_complete else num_computed // self._config.block_size

    def next_piece(self, now: float) -> list[Action]:
        """Begin one more piece, if blocks are finished that are in none yet. Empty if not."""
        if not self.has_piece():
            return []
        num_blocks = min(self._num_finished() - self._next_block, self._config.max_piece_blocks)
        piece = Piece(*self._sequence.key, PieceIndex(self._num_pieces), self._next_block, num_blocks)
        self._num_pieces += 1
        self._next_block += num_blocks
        if self._in_place:
            return self._send(piece)
        self._offered[piece.index] = piece
        self.deadline = now + self._config.peer_timeout_s
        offer = KvOffer(
            request=piece.request,
            attempt=piece.attempt,
            piece=piece.index,
            first_block=piece.first_block,
            num_blocks=piece.num_blocks,
            num_bytes=piece.num_blocks * self._config.block_bytes,
        )
        return [ToPeer(self.peer, offer)]

    def ready(self, index: PieceIndex, now: float) -> list[Action] | None:
        """`KvReady`: D has posted the receive, so the bytes go, even if the attempt is over."""
        piece = self._offered.pop(index, None)
        if piece is None:
            return None
        self.deadline = now + self._config.peer_timeout_s if self._offered else None
        return self._send(piece)

    def sent(self, piece: Piece, num_bytes: int, now: float) -> list[Action] | None:
        """`PieceSent`."""
        if self._sending.pop(piece.index, None) is None:
            return None
        actions: list[Action] = []
        if self._in_place and self.state is HandoffState.STREAMING:
            announce = KvPiece(
                request=piece.request,
                attempt=piece.attempt,
                piece=piece.index,
                first_block=piece.first_block,
                num_blocks=piece.num_blocks,
                num_bytes=num_bytes,
            )
            actions.append(ToPeer(self.peer, announce))
        return actions + self.settle(now)

    def sampled(self, token: TokenOutput, now: float) -> list[Action]:
        """Token 0 is out and does not end the request: commit once every piece is announced."""
        self._first_token, self._sampled_s = token, now
        return self.settle(now)

    def committed(self) -> list[Action] | None:
        """`KvCommitted`: D decodes."""
        if self.state is not HandoffState.COMMITTING:
            return None
        self._close()
        return []

    def offer_refused(self, index: PieceIndex) -> bool:
        """`KvRefused` to an offer: there is no receive for it. False if it is not out."""
        if self._offered.pop(index, None) is None:
            return False
        if not self._offered:
            self.deadline = None
        return True

    def refused(self) -> list[Action]:
        """`KvRefused` to `KvOpen`: nothing was opened."""
        self._close()
        return []

    def stop(self, reason: str, now: float, *, tell: bool = True) -> list[Action]:
        """The attempt is over here. `tell`: D does not know it from another message."""
        if self.state in (HandoffState.CLOSING, HandoffState.CLOSED):
            return []
        if self.state is HandoffState.DIALING:
            self._close()
            return []
        request, attempt = self._sequence.key
        actions: list[Action] = []
        if tell:
            actions.append(ToPeer(self.peer, KvAbort(request=request, attempt=attempt, reason=reason)))
        self._move(HandoffState.CLOSING)
        self.deadline = now + self._config.peer_timeout_s if self._offered else None
        return actions + self.settle(now)

    def edge_down(self) -> None:
        """The edge is gone, and with it everything in flight on it."""
        if self.state is not HandoffState.CLOSED:
            self._close()

    def unresponsive(self) -> list[Action]:
        """The deadline passed in CLOSING: D's receive and our offer will never meet."""
        self.deadline = None
        return [CloseEdge(self.peer, "the decode worker left an offered piece without answer")]

    def _send(self, piece: Piece) -> list[Action]:
        self._sending[piece.index] = piece
        blocks = slice(piece.first_block, piece.first_block + piece.num_blocks)
        return [
            SendPiece(
                self.peer,
                piece,
                tuple(self._sequence.block_ids[blocks]),
                tuple(self._target_blocks[blocks]),
            )
        ]

    def settle(self, now: float) -> list[Action]:
        """What is due now that something changed: the commit, or the end of CLOSING."""
        request, attempt = self._sequence.key
        if self.num_in_flight:
            return []
        if self.state is HandoffState.CLOSING:
            self._close()
            return [ToPeer(self.peer, KvClosed(request=request, attempt=attempt))]
        if (
            self.state is HandoffState.STREAMING
            and self._first_token is not None
            and self._next_block >= self._num_blocks
        ):
            self._move(HandoffState.COMMITTING)
            self.deadline = now + self._config.peer_timeout_s
            commit = KvCommit(
                request=request,
                attempt=attempt,
                lease=self._lease,
                output=self._first_token,
                num_tokens=self._sequence.num_tokens,
                token_age_s=max(0.0, now - self._sampled_s),
            )
            return [ToPeer(self.peer, commit)]
        return []

    def _close(self) -> None:
        self._move(HandoffState.CLOSED)
        self._offered.clear()
        self._sending.clear()
        self.deadline = None

    def _move(self, target: HandoffState) -> None:
        if target not in TRANSITIONS[self.state]:
            raise IllegalHandoff(f"illegal hand-off transition: {self.state.name} -> {target.name}")
        self.state = target
