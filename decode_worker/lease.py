"""One lease: the blocks D promised to an attempt, which of them hold their KV, and who may still write.

Life of a lease:

1. RESERVED: granted; blocks are allocated, nobody writes. It expires unless it is renewed.
2. RECEIVING: a prefill worker opened it. Pieces arrive, in order, each block once.
3. COMMITTING: the prefill worker has announced everything and told token 0; staged pieces may still come.
4. STARTED: every block is there and committed; the sequence belongs to the decode scheduler now.
5. ENDING: over before that. Its blocks stay used while an in-place writer may still write, a posted receive
   is on its way, or a scatter runs (I2).
6. ENDED: nothing touches the blocks any more; they are released.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from cluster.engine.sequence import Sequence
from cluster.errors import BatonError
from cluster.ids import LeaseId, PieceIndex
from cluster.kv.edge import Piece
from cluster.sampling import TokenOutput
from cluster.worker_io import Peer


class LeaseState(Enum):
    """See the module."""

    RESERVED = auto()
    RECEIVING = auto()
    COMMITTING = auto()
    STARTED = auto()
    ENDING = auto()
    ENDED = auto()

    __hash__ = object.__hash__  # an enum's own is Python; `TRANSITIONS` is asked at every move


_S = LeaseState
TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    _S.RESERVED: frozenset({_S.RECEIVING, _S.STARTED, _S.ENDING}),  # STARTED: a local prefill
    _S.RECEIVING: frozenset({_S.COMMITTING, _S.ENDING}),
    _S.COMMITTING: frozenset({_S.STARTED, _S.ENDING}),
    _S.STARTED: frozenset(),
    _S.ENDING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


class IllegalLease(BatonError):
    """A bug of ours: the lease was asked for a move that is not in the table."""


class ReceiveState(Enum):
    """A staged piece on its way into the pool."""

    POSTING = auto()  # `PostReceive` is out
    POSTED = auto()  # the peer may send; its bytes land in staging
    SCATTERING = auto()  # `Scatter` is out: the pool is being written


class Block(Enum):
    """What a block of the prompt holds."""

    MISSING = auto()
    ARRIVING = auto()  # part of a staged piece on its way
    COMPLETE = auto()


class Receive(msgspec.Struct, eq=False):
    """One staged piece between its offer and the pool."""

    piece: Piece
    state: ReceiveState = ReceiveState.POSTING


class Lease(msgspec.Struct, eq=False):
    """Mutable; written by the table that owns it and the intake that fills it."""

    sequence: Sequence
    lease: LeaseId
    ttl_s: float
    expires_s: float
    num_prompt_blocks: int
    blocks: list[Block] = msgspec.field(default_factory=list)  # per block of the prompt
    num_missing: int = 0  # blocks that are not COMPLETE
    state: LeaseState = LeaseState.RESERVED
    writer: Peer | None = None
    writer_may_write: bool = False  # in place, and not known to have stopped
    peer_holds: bool = False  # the writer still considers the attempt open
    next_piece: int = 0
    receives: dict[PieceIndex, Receive] = msgspec.field(default_factory=dict)
    first_token: TokenOutput | None = None
    first_token_s: float = 0.0  # when it was sampled, in this worker's clock
    opened_s: float = 0.0
    kv_bytes: int = 0
    intact: bool = True  # False once what arrived broke the protocol

    def move(self, target: LeaseState) -> None:
        if target not in TRANSITIONS[self.state]:
            raise IllegalLease(f"illegal lease transition: {self.state.name} -> {target.name}")
        self.state = target

    @property
    def live(self) -> bool:
        """Still wanted and waiting for KV."""
        return self.state in (LeaseState.RESERVED, LeaseState.RECEIVING, LeaseState.COMMITTING)

    @property
    def touched(self) -> bool:
        """Something may still write into the blocks."""
        return self.writer_may_write or bool(self.receives)

    def accepts(self, piece: Piece) -> bool:
        """The piece is the next one and all its blocks are missing."""
        end = piece.first_block + piece.num_blocks
        return (
            piece.index == self.next_piece
            and 0 <= piece.first_block < end <= self.num_prompt_blocks
            and all(block is Block.MISSING for block in self.blocks[piece.first_block : end])
        )

    def mark(self, piece: Piece, block: Block) -> None:
        """All blocks of the piece change to `block`."""
        for index in range(piece.first_block, piece.first_block + piece.num_blocks):
            self.num_missing += (self.blocks[index] is Block.COMPLETE) - (block is Block.COMPLETE)
            self.blocks[index] = block

    def num_leading_tokens(self, block_size: int) -> int:
        """Tokens from the start of the prompt whose KV is complete without a gap."""
        num_blocks = next(
            (index for index, block in enumerate(self.blocks) if block is not Block.COMPLETE),
            self.num_prompt_blocks,
        )
        return min(num_blocks * block_size, self.sequence.num_initial)
