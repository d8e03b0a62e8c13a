"""The hand-off of one attempt: order of messages, both kinds of edge, every way to stop."""

from __future__ import annotations

import pytest

from cluster.engine.sequence import Sequence
from cluster.ids import BlockId, LeaseId, PieceIndex
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams, TokenOutput
from cluster.wire.kv_messages import KvAbort, KvClosed, KvCommit, KvOffer, KvOpen, KvPiece
from cluster.worker_io import CloseEdge, SendPiece
from prefill_worker.handoff import (
    TRANSITIONS,
    Handoff,
    HandoffConfig,
    HandoffState,
    IllegalHandoff,
)
from tests.support.worker_messages import A1, R1, ROUTER, D, only, to_peer

CONFIG = HandoffConfig(block_size=4, block_bytes=10, max_piece_bytes=20, peer_timeout_s=3.0)
TARGETS = [BlockId(90 + i) for i in range(4)]


def make(num_tokens: int = 14, skip: int = 0) -> tuple[Handoff, Sequence]:
    blocks = BlockManager(8, 4, "m")
    sequence = Sequence(
        ROUTER, R1, A1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=4), "", 1, 0.0
    )
    assert sequence.reserve(blocks, -(-num_tokens // 4))
    return Handoff(CONFIG, sequence, D, LeaseId(1), skip, now=0.0), sequence


def streaming(*, in_place: bool, num_tokens: int = 14, skip: int = 0) -> tuple[Handoff, Sequence]:
    handoff, sequence = make(num_tokens, skip)
    assert to_peer(handoff.edge_up(in_place, 0.0), KvOpen)
    assert handoff.opened(TARGETS[: -(-num_tokens // 4)]) == []
    assert handoff.target_fits
    return handoff, sequence


def test_in_place_pieces_follow_the_chunks_and_commit_comes_last() -> None:
    handoff, sequence = streaming(in_place=True)
    assert handoff.next_piece(0.0) == []
    sequence.advance(9)
    first = only(handoff.next_piece(0.0), SendPiece)
    assert (first.piece.first_block, first.piece.num_blocks) == (0, 2)
    assert list(first.target_blocks) == TARGETS[:2]
    assert list(first.source_blocks) == sequence.block_ids[:2]
    assert handoff.next_piece(0.0) == []  # the third block is not full yet
    sequence.advance(5)
    assert handoff.sampled(TokenOutput(7), 0.0) == []  # pieces are still to go
    second = only(handoff.next_piece(0.0), SendPiece)
    assert (second.piece.first_block, second.piece.num_blocks) == (2, 2)  # the partial one included
    announced = handoff.sent(first.piece, 20, 0.0)
    assert announced is not None
    assert [m.piece for m in to_peer(announced, KvPiece)] == [0]
    assert not to_peer(announced, KvCommit)
    last = handoff.sent(second.piece, 20, 0.0)
    assert last is not None
    assert [type(m).__name__ for m in to_peer(last, object)] == ["KvPiece", "KvCommit"]
    assert to_peer(last, KvCommit)[0].num_tokens == 14
    assert handoff.committed() == []
    assert handoff.state is HandoffState.CLOSED


def test_staged_pieces_are_sent_when_the_receive_is_posted() -> None:
    handoff, sequence = streaming(in_place=False)
    sequence.advance(14)
    offer = to_peer(handoff.next_piece(0.0), KvOffer)[0]
    assert (offer.piece, offer.num_blocks, offer.num_bytes) == (0, 2, 20)
    assert handoff.deadline == 3.0
    sent = handoff.ready(PieceIndex(0), 1.0)
    assert sent is not None
    piece = only(sent, SendPiece).piece
    assert handoff.deadline is None
    assert handoff.ready(PieceIndex(0), 1.0) is None  # a duplicate
    assert handoff.sent(piece, 20, 1.0) == []
    assert handoff.sent(piece, 20, 1.0) is None


@pytest.mark.parametrize(
    ("skip", "num_tokens", "pieces"), [(8, 14, [(2, 2)]), (16, 16, []), (4, 8, [(1, 1)])]
)
def test_b079_only_what_is_missing_is_sent(skip: int, num_tokens: int, pieces: list[tuple[int, int]]) -> None:
    handoff, sequence = streaming(in_place=True, num_tokens=num_tokens, skip=skip)
    sequence.advance(num_tokens)
    sent = []
    while actions := handoff.next_piece(0.0):
        sent.append(only(actions, SendPiece).piece)
        handoff.sent(sent[-1], 0, 0.0)
    assert [(piece.first_block, piece.num_blocks) for piece in sent] == pieces
    assert to_peer(handoff.sampled(TokenOutput(1), 0.0), KvCommit)


def test_stop_waits_for_a_send_in_flight_and_announces_nothing_more() -> None:
    handoff, sequence = streaming(in_place=True)
    sequence.advance(14)
    piece = only(handoff.next_piece(0.0), SendPiece).piece
    stopped = handoff.stop("aborted", 0.0)
    assert to_peer(stopped, KvAbort)
    assert not to_peer(stopped, KvClosed)
    assert handoff.state is HandoffState.CLOSING
    assert handoff.next_piece(0.0) == []
    assert handoff.stop("again", 0.0) == []
    done = handoff.sent(piece, 20, 0.0)
    assert done is not None
    assert [type(m) for m in to_peer(done, object)] == [KvClosed]
    assert handoff.state is HandoffState.CLOSED


def test_an_offer_must_be_answered_before_a_staged_attempt_closes() -> None:
    handoff, sequence = streaming(in_place=False)
    sequence.advance(14)
    handoff.next_piece(0.0)
    handoff.next_piece(0.0)
    assert not to_peer(handoff.stop("aborted", 0.0), KvClosed)
    sent = handoff.ready(PieceIndex(0), 1.0)  # the receive is posted: only the bytes complete it
    assert sent is not None
    assert handoff.offer_refused(PieceIndex(1))
    assert not handoff.offer_refused(PieceIndex(1))
    assert handoff.settle(1.0) == []
    closed = handoff.sent(only(sent, SendPiece).piece, 20, 1.0)
    assert closed is not None
    assert to_peer(closed, KvClosed)


def test_every_offer_has_its_deadline() -> None:
    handoff, sequence = streaming(in_place=False)
    sequence.advance(14)
    handoff.next_piece(0.0)
    handoff.next_piece(0.0)
    handoff.ready(PieceIndex(0), 1.0)
    assert handoff.deadline == 4.0  # the second offer is still out
    assert handoff.offer_refused(PieceIndex(1))
    assert handoff.deadline is None


def test_a_decode_worker_that_never_answers_an_offer_costs_the_edge() -> None:
    handoff, sequence = streaming(in_place=False)
    sequence.advance(14)
    handoff.next_piece(0.0)
    handoff.stop("aborted", 1.0)
    assert handoff.deadline == 4.0
    assert only(handoff.unresponsive(), CloseEdge).peer == D
    assert handoff.deadline is None
    handoff.edge_down()
    assert handoff.state is HandoffState.CLOSED


@pytest.mark.parametrize("in_place", [True, False])
def test_stop_before_anything_is_in_flight(in_place: bool) -> None:
    handoff, _ = make()
    assert handoff.stop("x", 0.0) == []  # dialling: D knows nothing
    handoff, _ = make()
    handoff.edge_up(in_place, 0.0)
    assert [type(m) for m in to_peer(handoff.stop("x", 0.0), object)] == [KvAbort, KvClosed]
    handoff, _ = streaming(in_place=in_place)
    assert [type(m) for m in to_peer(handoff.stop("x", 0.0, tell=False), object)] == [KvClosed]


def test_what_does_not_belong_to_the_state_is_stale() -> None:
    handoff, _ = make()
    assert handoff.opened(TARGETS) is None
    assert handoff.committed() is None
    assert handoff.ready(PieceIndex(0), 0.0) is None
    handoff.edge_up(True, 0.0)
    assert handoff.opened(TARGETS[:1]) == []
    assert not handoff.target_fits
    assert handoff.opened(TARGETS) is None


def test_the_table_leaves_no_way_out_of_closed_and_every_state_can_close() -> None:
    assert TRANSITIONS.keys() == set(HandoffState)
    assert TRANSITIONS[HandoffState.CLOSED] == frozenset()
    for state in HandoffState:
        if state is not HandoffState.CLOSED:
            assert HandoffState.CLOSED in TRANSITIONS[state]
    handoff, _ = make()
    with pytest.raises(IllegalHandoff, match="DIALING -> COMMITTING"):
        handoff._move(HandoffState.COMMITTING)
