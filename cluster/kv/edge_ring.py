"""A receiver's staging: which slots hold whose bytes, and how many are left to promise. Pure.

Life of a piece's slots:

1. `claim`: the piece's blocks are cut into parts of a slot each; it takes that many free slots, or none and
   has to wait. Slots are the edge's credits: nothing is promised to P that has no place here.
2. `POSTED`: receives into them are posted. P cannot take back what it sends, so nothing else may use them.
3. `landed`: all bytes are there (`STAGED`), under a handle.
4. `leave`: somebody copies them out, or drops them (`LEAVING`); once only.
5. `release`: nobody reads them any more; the slots are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from cluster.errors import EdgeError
from cluster.kv.edge import Piece


class ClaimState(Enum):
    """See the module."""

    POSTED = auto()
    STAGED = auto()
    LEAVING = auto()
    RELEASED = auto()


@dataclass(slots=True, eq=False)
class Claim:
    """Slots of one piece, in the order of its parts. The ring changes it, others read it."""

    piece: Piece
    slots: tuple[int, ...]
    state: ClaimState = ClaimState.POSTED


def cut(num_blocks: int, blocks_per_slot: int) -> list[range]:
    """The parts of a piece's blocks [0, num_blocks), alike on both sides; the last may be shorter."""
    starts = range(0, num_blocks, blocks_per_slot)
    return [range(start, min(start + blocks_per_slot, num_blocks)) for start in starts]


class StagingRing:
    """Owns the slots of one receiver."""

    def __init__(self, name: str, num_slots: int, blocks_per_slot: int) -> None:
        """`name` is the edge's, for errors."""
        self._name = name
        self.num_slots = num_slots
        self.blocks_per_slot = blocks_per_slot
        self._free = list(range(num_slots))
        self._posted: dict[Piece, Claim] = {}
        self._staged: dict[int, Claim] = {}
        self._leaving: list[Claim] = []
        self._next_handle = 0

    @property
    def num_free(self) -> int:
        """Credits."""
        return len(self._free)

    def check(self, piece: Piece) -> None:
        """
        Raises:
            EdgeError: the piece is posted already, or can never fit.
        """
        if len(cut(piece.num_blocks, self.blocks_per_slot)) > self.num_slots:
            raise too_large(self._name, piece, self.num_slots * self.blocks_per_slot)
        if piece in self._posted:
            raise EdgeError(f"KV edge {self._name}: {piece} is posted already")

    def claim(self, piece: Piece) -> Claim | None:
        """Slots for a piece that `check` let pass; None: not so many are free now."""
        num_parts = len(cut(piece.num_blocks, self.blocks_per_slot))
        if num_parts > len(self._free):
            return None
        self.check(piece)
        slots, self._free = self._free[:num_parts], self._free[num_parts:]
        claim = self._posted[piece] = Claim(piece, tuple(slots))
        return claim

    def posted(self, piece: Piece) -> Claim:
        """
        Raises:
            EdgeError: the piece is not posted.
        """
        claim = self._posted.get(piece)
        if claim is None:
            raise EdgeError(f"KV edge {self._name}: {piece} is not posted")
        return claim

    def landed(self, piece: Piece) -> int:
        """All bytes of a posted piece are there; returns their handle.

        Raises:
            EdgeError: the piece is not posted.
        """
        claim = self.posted(piece)
        del self._posted[piece]
        claim.state = ClaimState.STAGED
        handle = self._next_handle
        self._next_handle += 1
        self._staged[handle] = claim
        return handle

    def leave(self, piece: Piece, handle: int) -> Claim:
        """Take a staged piece; `release` it when nobody reads its slots any more.

        Raises:
            EdgeError: it is not in staging (any more).
        """
        claim = self._staged.get(handle)
        if claim is None or claim.piece != piece:
            raise EdgeError(f"KV edge {self._name}: {piece} is not in staging")
        del self._staged[handle]
        claim.state = ClaimState.LEAVING
        self._leaving.append(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """The slots of a piece that has left are free."""
        assert claim.state is ClaimState.LEAVING, "slots may still be written or read"
        claim.state = ClaimState.RELEASED
        self._leaving.remove(claim)
        self._free += claim.slots

    def check_integrity(self) -> None:
        """Every slot is free or somebody's, exactly once."""
        claims = [*self._posted.values(), *self._staged.values(), *self._leaving]
        used = [slot for claim in claims for slot in claim.slots]
        assert sorted([*self._free, *used]) == list(range(self.num_slots)), (self._free, claims)


def too_large(name: str, piece: Piece, max_blocks: int) -> EdgeError:
    """A piece that no staging of `max_blocks` can hold."""
    return EdgeError(
        f"KV edge {name}: a piece of {piece.num_blocks} blocks does not fit the staging of {max_blocks}; "
        "send smaller pieces or give the edge more slots"
    )
