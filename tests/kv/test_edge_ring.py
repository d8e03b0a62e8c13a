"""The staging ring: slots are promised once, used once, and come back, whatever happens in what order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import EdgeError
from cluster.ids import Attempt, PieceIndex, RequestId
from cluster.kv.edge import Piece
from cluster.kv.edge_ring import Claim, ClaimState, StagingRing, cut


def piece_of(index: int, num_blocks: int) -> Piece:
    return Piece(RequestId("r"), Attempt(1), PieceIndex(index), 0, num_blocks)


@given(st.integers(1, 200), st.integers(1, 20))
def test_parts_cover_a_piece_once_and_fill_their_slots(num_blocks: int, blocks_per_slot: int) -> None:
    parts = cut(num_blocks, blocks_per_slot)
    assert [block for part in parts for block in part] == list(range(num_blocks))
    assert all(len(part) == blocks_per_slot for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= blocks_per_slot


STEPS = st.lists(
    st.tuples(st.sampled_from(["claim", "land", "leave", "release"]), st.integers(0, 9)), max_size=80
)


@given(st.integers(1, 5), st.integers(1, 4), STEPS)
def test_slots_are_never_two_pieces_and_never_lost(
    num_slots: int, blocks_per_slot: int, steps: list[tuple[str, int]]
) -> None:
    """Against a model that only counts."""
    ring = StagingRing("e", num_slots, blocks_per_slot)
    posted: list[Claim] = []
    staged: list[tuple[Claim, int]] = []
    leaving: list[Claim] = []
    num_claims = 0

    def num_used() -> int:
        claims = [*posted, *(claim for claim, _ in staged), *leaving]
        return sum(len(claim.slots) for claim in claims)

    for do, which in steps:
        if do == "claim":
            piece = piece_of(num_claims, 1 + which % (num_slots * blocks_per_slot))
            needed = len(cut(piece.num_blocks, blocks_per_slot))
            claim = ring.claim(piece)
            assert (claim is None) == (needed > num_slots - num_used())
            if claim is not None:
                assert len(claim.slots) == needed
                posted.append(claim)
                num_claims += 1
        elif do == "land" and posted:
            claim = posted.pop(which % len(posted))
            staged.append((claim, ring.landed(claim.piece)))
        elif do == "leave" and staged:
            claim, handle = staged.pop(which % len(staged))
            assert ring.leave(claim.piece, handle) is claim
            leaving.append(claim)
        elif do == "release" and leaving:
            claim = leaving.pop(which % len(leaving))
            ring.release(claim)
            assert claim.state is ClaimState.RELEASED
        ring.check_integrity()
        assert ring.num_free == num_slots - num_used()


def test_a_piece_is_posted_once_and_used_once() -> None:
    ring, piece = StagingRing("e", 3, 4), piece_of(0, 9)
    claim = ring.claim(piece)
    assert claim is not None
    assert ring.num_free == 0
    assert ring.claim(piece_of(1, 1)) is None
    with pytest.raises(EdgeError, match="posted already"):
        ring.check(piece)
    with pytest.raises(EdgeError, match="not posted"):
        ring.landed(piece_of(1, 1))
    handle = ring.landed(piece)
    with pytest.raises(EdgeError, match="not posted"):
        ring.landed(piece)
    with pytest.raises(EdgeError, match="not in staging"):
        ring.leave(piece_of(1, 9), handle)  # another piece's handle
    ring.leave(piece, handle)
    with pytest.raises(EdgeError, match="not in staging"):
        ring.leave(piece, handle)
    assert ring.num_free == 0  # somebody still reads them
    ring.release(claim)
    assert ring.num_free == 3
    with pytest.raises(AssertionError):
        ring.release(claim)


def test_what_can_never_fit_is_refused_not_waited_for() -> None:
    ring = StagingRing("e", 3, 4)
    ring.check(piece_of(0, 12))
    with pytest.raises(EdgeError, match="13 blocks does not fit the staging of 12"):
        ring.check(piece_of(0, 13))
