"""Leases: granting, receiving in place and staged, ending early, and what may be freed when."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.engine.sequence import Sequence
from cluster.ids import Attempt, BlockId, Epoch, LeaseId, PieceIndex, RequestId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece, Staged
from cluster.sampling import SamplingParams, TokenOutput
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
)
from cluster.wire.messages import AttemptFailed, Committed, Grant, Nack, NackReason, RenewLeases, Reserve
from cluster.worker_io import Action, Discard, Peer, PostReceive, Scatter
from decode_worker.admission import IntakeConfig
from decode_worker.intake import Intake
from decode_worker.lease import TRANSITIONS, IllegalLease, LeaseState
from decode_worker.lease_table import LeaseTable
from tests.support.worker_messages import A1, R1, ROUTER, P, only, reserve, to_peer, to_router

BYTES = 10


def intake(num_blocks: int = 16, **config: Any) -> tuple[Intake, BlockManager]:
    blocks = BlockManager(num_blocks, 4, "m")
    settings = IntakeConfig(block_bytes=BYTES, **config)
    return Intake(settings, blocks, LeaseTable(settings, blocks)), blocks


def ask(
    one: Intake,
    tokens: list[int],
    now: float = 0.0,
    *,
    running: int = 0,
    preempted: bool = False,
    **fields: Any,
) -> list[Action]:
    message = reserve(tokens, **fields).message
    assert isinstance(message, Reserve)
    return one._leases.reserve(ROUTER, message, now, num_running=running, has_preempted=preempted)


def granted(one: Intake, tokens: list[int], **fields: Any) -> Grant:
    return to_router(ask(one, tokens, **fields), Grant)[0]


def open_at(one: Intake, grant: Grant, *, in_place: bool, peer: Peer = P) -> list[BlockId]:
    one.edge_up(peer, in_place)
    message = KvOpen(request=grant.request, attempt=grant.attempt, lease=grant.lease)
    return to_peer(one.from_peer(peer, message, 1.0), KvOpened)[0].block_ids


def piece(index: int, first: int, num: int, *, num_bytes: int | None = None, attempt: int = 1) -> KvPiece:
    return KvPiece(
        request=R1,
        attempt=Attempt(attempt),
        piece=PieceIndex(index),
        first_block=first,
        num_blocks=num,
        num_bytes=num * BYTES if num_bytes is None else num_bytes,
    )


def offer(index: int, first: int, num: int) -> KvOffer:
    return KvOffer(
        request=R1,
        attempt=A1,
        piece=PieceIndex(index),
        first_block=first,
        num_blocks=num,
        num_bytes=num * BYTES,
    )


def commit(grant: Grant, num_tokens: int) -> KvCommit:
    return KvCommit(
        request=grant.request,
        attempt=grant.attempt,
        lease=grant.lease,
        output=TokenOutput(5),
        num_tokens=num_tokens,
    )


def moved(index: int, first: int, num: int) -> Piece:
    return Piece(R1, A1, PieceIndex(index), first, num)


CLOSED = KvClosed(request=R1, attempt=A1)


class TestReserve:
    @pytest.mark.parametrize(("num_tokens", "num_blocks"), [(3, 2), (4, 2), (5, 3), (7, 3), (8, 3), (9, 4)])
    def test_b117_prompt_blocks_and_headroom(self, num_tokens: int, num_blocks: int) -> None:
        one, blocks = intake()
        grant = granted(one, list(range(num_tokens)))
        assert blocks.counts().used == num_blocks
        assert len(open_at(one, grant, in_place=True)) == -(-num_tokens // 4)

    def test_headroom_is_not_granted_beyond_the_longest_output(self) -> None:
        one, blocks = intake()
        granted(one, [1, 2, 3], params=SamplingParams(max_tokens=2))  # 4 tokens of KV at most
        assert blocks.counts().used == 1

    def test_b060_prompt_plus_output_that_can_never_fit_is_refused_for_good(self) -> None:
        one, _ = intake(num_blocks=4)
        fits, too_large = SamplingParams(max_tokens=7), SamplingParams(max_tokens=8)
        assert to_router(ask(one, list(range(10)), params=fits), Grant)
        nack = to_router(ask(one, list(range(10)), request="r2", params=too_large, running=99), Nack)[0]
        assert nack.reason is NackReason.TOO_LARGE
        assert "10 prompt tokens" in nack.detail
        assert "16 tokens" in nack.detail

    def test_a_resumed_attempt_may_use_what_is_left_of_its_output(self) -> None:
        one, _ = intake(num_blocks=4)
        params = SamplingParams(max_tokens=7)
        assert to_router(ask(one, list(range(16)), num_prompt_tokens=10, params=params), Grant)

    def test_no_slot(self) -> None:
        one, _ = intake(max_num_seqs=2)
        granted(one, [1])
        assert to_router(ask(one, [1], request="r2", running=1), Nack)[0].reason is NackReason.NO_SLOT

    def test_b094_blocks_for_growth_stay_free(self) -> None:
        one, blocks = intake(num_blocks=6)
        granted(one, list(range(8)))  # 2 + 1
        nack = to_router(ask(one, list(range(8)), request="r2", params=SamplingParams(max_tokens=3)), Nack)
        assert nack[0].reason is NackReason.NO_BLOCKS  # 3 would fit, but nothing would be left to grow
        assert nack[0].retry_after_s > 0
        assert blocks.counts().used == 3
        granted(one, [50], request="r3", params=SamplingParams(max_tokens=2))

    def test_preempted_sequences_come_first(self) -> None:
        one, _ = intake()
        assert to_router(ask(one, [1], preempted=True), Nack)[0].reason is NackReason.NO_BLOCKS

    def test_bad_tokens(self) -> None:
        one, blocks = intake()
        assert to_router(ask(one, [-1]), AttemptFailed)[0].retryable is False
        assert blocks.counts().used == 0

    def test_a_local_prefill_starts_at_once_and_leaves_a_token_to_compute(self) -> None:
        one, blocks = intake()
        publish(blocks, list(range(8)))
        assert granted(one, list(range(8)), local=True).cached_tokens == 4
        [sequence] = one._leases.take_started()
        assert sequence.num_remaining == 4
        assert len(one._leases) == 0
        assert one._leases.next_deadline() is None


def publish(blocks: BlockManager, tokens: list[int]) -> None:
    held = blocks.allocate(len(tokens) // 4)
    assert held is not None
    blocks.publish(held, tokens, "")
    blocks.release(held)


class TestNextAttempt:
    def test_b082_complete_pieces_are_there_for_the_next_attempt_at_once(self) -> None:
        """P died in place: its death is not proven yet, so nothing of the lease is freed. What it announced
        is final all the same: the next attempt, right behind the abort, gets it without a copy."""
        one, blocks = intake()
        tokens = list(range(14))
        grant = granted(one, tokens)
        open_at(one, grant, in_place=True)
        one.from_peer(P, piece(0, 0, 2), 2.0)
        one.edge_down(P)
        lease = one._leases.of_request(R1)
        assert lease is not None
        one._leases.end(lease, "the prefill worker is gone")
        assert blocks.counts().used == 5  # quarantine
        again = granted(one, tokens, attempt=2)
        assert again.cached_tokens == 8
        assert blocks.counts().used == 5 + 3
        blocks.check_integrity()
        one.writer_gone(P)
        assert blocks.counts().used == 5
        blocks.check_integrity()

    def test_what_broke_the_protocol_is_nobodys_prefix(self) -> None:
        one, _ = intake()
        tokens = list(range(14))
        grant = granted(one, tokens)
        open_at(one, grant, in_place=True)
        one.from_peer(P, piece(0, 0, 2), 2.0)
        failed = to_router(one.from_peer(P, piece(1, 0, 1), 2.0), AttemptFailed)  # block 0 again
        assert failed[0].code == "bad_kv"
        assert granted(one, tokens, attempt=2).cached_tokens == 0


class TestReceiving:
    @pytest.mark.parametrize("num_cached", [0, 4, 8])
    def test_b079_starts_when_what_was_missing_is_there(self, num_cached: int) -> None:
        one, blocks = intake()
        tokens = list(range(10))
        publish(blocks, tokens[:num_cached])
        grant = granted(one, tokens)
        assert grant.cached_tokens == num_cached
        open_at(one, grant, in_place=True)
        first = num_cached // 4
        for index, block in enumerate(range(first, 3)):
            assert one.from_peer(P, piece(index, block, 1), 2.0) == []
        actions = one.from_peer(P, commit(grant, 10), 3.0)
        assert to_peer(actions, KvCommitted)
        done = to_router(actions, Committed)[0]
        assert (done.kv_bytes, done.kv_transfer_s) == ((3 - first) * BYTES, 2.0)
        [sequence] = one._leases.take_started()
        assert (sequence.num_computed, sequence.num_remaining) == (10, 1)
        assert sequence.output_ids == [5]
        assert (len(one._leases), one._leases.num_live) == (0, 0)
        assert one._leases.next_deadline() is None

    def test_i5_staged_pieces_have_to_be_scattered_first(self) -> None:
        one, _ = intake()
        grant = granted(one, list(range(10)))
        blocks_of = open_at(one, grant, in_place=False)
        posts = [one.from_peer(P, offer(0, 0, 2), 1.0), one.from_peer(P, offer(1, 2, 1), 1.0)]
        assert [only(post, PostReceive).num_bytes for post in posts] == [20, 10]
        assert to_peer(one.posted(P, moved(0, 0, 2)), KvReady)[0].piece == 0
        assert to_peer(one.posted(P, moved(1, 2, 1)), KvReady)[0].piece == 1
        assert one.from_peer(P, commit(grant, 10), 1.0) == []
        first = Staged(moved(0, 0, 2), 7, 20)
        assert list(only(one.staged(P, first), Scatter).target_blocks) == blocks_of[:2]
        assert one.scattered(P, moved(0, 0, 2), 20, 1.0) == []
        one.staged(P, Staged(moved(1, 2, 1), 8, 10))
        assert not one._leases.take_started()
        assert to_peer(one.scattered(P, moved(1, 2, 1), 10, 1.0), KvCommitted)
        assert len(one._leases.take_started()) == 1

    @pytest.mark.parametrize(
        "bad",
        [
            piece(0, 0, 4),  # beyond the prompt
            piece(0, -1, 1),
            piece(0, 0, 0),
            piece(1, 0, 1),  # one was left out
            piece(0, 0, 1, num_bytes=9),  # short
            offer(0, 0, 1),  # not in place
            KvCommit(request=R1, attempt=A1, lease=LeaseId(1), output=TokenOutput(1), num_tokens=10),
            KvCommit(request=R1, attempt=A1, lease=LeaseId(1), output=TokenOutput(1), num_tokens=9),
        ],
    )
    def test_bad_kv_fails_closed(self, bad: Any) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(10))), in_place=True)
        actions = one.from_peer(P, bad, 1.0)
        failed = to_router(actions, AttemptFailed)[0]
        assert (failed.code, failed.retryable) == ("bad_kv", True)
        assert to_peer(actions, KvAbort)
        assert blocks.counts().used > 0
        one.from_peer(P, CLOSED, 1.0)
        assert blocks.counts() == blocks.counts().__class__(used=0, cached=0, free=16)

    def test_a_block_cannot_come_twice(self) -> None:
        one, _ = intake()
        open_at(one, granted(one, list(range(10))), in_place=True)
        one.from_peer(P, piece(0, 0, 2), 1.0)
        assert to_router(one.from_peer(P, piece(1, 1, 2), 1.0), AttemptFailed)

    def test_b087_duplicate_and_foreign_messages_are_counted(self) -> None:
        one, _ = intake()
        grant = granted(one, list(range(10)))
        other = Peer(WorkerId("prefill-0"), Epoch(2))
        open_at(one, grant, in_place=True)
        one.edge_up(other, True)
        one.from_peer(P, piece(0, 0, 2), 1.0)
        late: list[tuple[Peer, Any]] = [
            (P, KvOpen(request=R1, attempt=A1, lease=grant.lease)),
            (P, piece(0, 0, 2)),
            (P, piece(0, 2, 1, attempt=2)),
            (other, piece(1, 2, 1)),
            (other, commit(grant, 10)),
            (P, KvCommit(request=R1, attempt=A1, lease=LeaseId(9), output=TokenOutput(1), num_tokens=10)),
            (P, KvAbort(request=RequestId("never"), attempt=A1, reason="?")),
            (P, KvClosed(request=RequestId("never"), attempt=A1)),
            (Peer(WorkerId("unknown"), Epoch(1)), piece(1, 2, 1)),
        ]
        for peer, message in late:
            assert one.from_peer(peer, message, 1.0) == []
        assert one.num_stale == len(late)
        assert one.posted(P, moved(3, 0, 1)) == one.scattered(P, moved(3, 0, 1), 10, 1.0) == []
        assert only(one.staged(P, Staged(moved(3, 0, 1), 4, 10)), Discard).staged.slot == 4
        one.from_peer(P, piece(1, 2, 1), 1.0)
        assert to_peer(one.from_peer(P, commit(grant, 10), 1.0), KvCommitted)
        assert one.from_peer(P, commit(grant, 10), 1.0) == []

    @pytest.mark.parametrize("what", ["unknown", "lease", "peer"])
    def test_an_open_without_lease_is_refused(self, what: str) -> None:
        one, _ = intake()
        grant = granted(one, list(range(4)))
        one.edge_up(P, True)
        lease = LeaseId(99) if what == "lease" else grant.lease
        request = RequestId("r9") if what == "unknown" else R1
        if what == "peer":
            open_at(one, grant, in_place=True, peer=Peer(WorkerId("prefill-1"), Epoch(1)))
        actions = one.from_peer(P, KvOpen(request=request, attempt=A1, lease=lease), 1.0)
        assert to_peer(actions, KvRefused)[0].piece is None


class TestEnding:
    def end(self, one: Intake) -> list[Action]:
        lease = one._leases.of_request(R1)
        assert lease is not None
        return one._leases.end(lease, "aborted")

    def test_nobody_writes_freed_at_once(self) -> None:
        one, blocks = intake()
        granted(one, list(range(10)))
        assert self.end(one) == []
        assert blocks.counts().used == 0

    def test_i2_an_in_place_writer_keeps_the_blocks_used_until_it_has_closed(self) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(10))), in_place=True)
        one.from_peer(P, piece(0, 0, 1), 1.0)
        assert to_peer(self.end(one), KvAbort)
        assert (blocks.counts().used, one._leases.num_live, len(one._leases)) == (4, 0, 1)
        one.from_peer(P, piece(1, 1, 1), 1.0)  # was on its way
        assert one.num_stale == 1
        one.from_peer(P, CLOSED, 1.0)
        assert (blocks.counts().used, len(one._leases)) == (0, 0)
        assert blocks.counts().cached == 1  # the complete head

    def test_a_broken_edge_does_not_prove_the_writer_gone(self) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(10))), in_place=True)
        self.end(one)
        one.edge_down(P)
        assert blocks.counts().used == 4
        one.writer_gone(Peer(WorkerId("prefill-0"), Epoch(2)))
        assert blocks.counts().used == 4
        one.writer_gone(P)
        assert blocks.counts().used == 0

    def test_a_new_edge_to_the_same_writer_asks_again(self) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(10))), in_place=True)
        one.edge_down(P)
        assert self.end(one) == []  # nobody to tell
        assert [m.request for m in to_peer(one.edge_up(P, True), KvAbort)] == ["r1"]
        one.from_peer(P, CLOSED, 1.0)
        assert blocks.counts().used == 0

    def test_b082_a_lost_prefill_worker_leaves_lease_and_complete_blocks(self) -> None:
        one, blocks = intake()
        grant = granted(one, list(range(10)))
        open_at(one, grant, in_place=True)
        one.from_peer(P, piece(0, 0, 2), 1.0)
        one.edge_down(P)
        one.writer_gone(P)
        assert one._leases.num_live == 1
        self.end(one)
        assert granted(one, list(range(10)), attempt=2).cached_tokens == 8
        assert blocks.counts().used == 4

    @pytest.mark.parametrize("gap", [True, False])
    def test_only_a_head_without_gap_is_kept(self, gap: bool) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(12))), in_place=True)
        one.from_peer(P, piece(0, 1 if gap else 0, 2), 1.0)
        self.end(one)
        one.from_peer(P, CLOSED, 1.0)
        assert blocks.counts().cached == (0 if gap else 2)

    @pytest.mark.parametrize("stage", ["posting", "posted", "scattering"])
    @pytest.mark.parametrize("lost", [True, False])
    def test_i2_staged_receives_are_drained_before_blocks_are_freed(self, stage: str, lost: bool) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(10))), in_place=False)
        one.from_peer(P, offer(0, 0, 2), 1.0)
        staged = Staged(moved(0, 0, 2), 7, 20)
        if stage != "posting":
            one.posted(P, moved(0, 0, 2))
        if stage == "scattering":
            one.staged(P, staged)
        assert to_peer(self.end(one), KvAbort)
        assert blocks.counts().used == 4
        if lost:
            one.edge_down(P)
            assert blocks.counts().used == (4 if stage == "scattering" else 0)
        elif stage == "posting":
            assert to_peer(one.posted(P, moved(0, 0, 2)), KvReady)  # only its bytes complete the receive
        if stage == "scattering":
            one.scattered(P, moved(0, 0, 2), 20, 1.0)
        elif not lost:
            assert only(one.staged(P, staged), Discard).staged is staged
        assert (blocks.counts().used, len(one._leases)) == (0, 0)
        assert blocks.counts().cached == (2 if stage == "scattering" else 0)

    def test_an_offer_after_the_end_is_refused_by_its_index(self) -> None:
        one, _ = intake()
        open_at(one, granted(one, list(range(10))), in_place=False)
        one.from_peer(P, offer(0, 0, 1), 1.0)
        self.end(one)
        assert to_peer(one.from_peer(P, offer(1, 1, 1), 1.0), KvRefused)[0].piece == 1
        assert one.from_peer(P, offer(0, 0, 1), 1.0) == []  # a duplicate of the one that is posted

    def test_a_scatter_outlives_its_edge_and_still_counts(self) -> None:
        one, _ = intake()
        grant = granted(one, list(range(8)))
        open_at(one, grant, in_place=False)
        one.from_peer(P, offer(0, 0, 2), 1.0)
        one.posted(P, moved(0, 0, 2))
        one.staged(P, Staged(moved(0, 0, 2), 7, 20))
        one.from_peer(P, commit(grant, 8), 1.0)
        one.edge_down(P)
        actions = one.scattered(P, moved(0, 0, 2), 20, 1.0)
        assert to_router(actions, Committed)
        assert not to_peer(actions, KvCommitted)  # the edge is gone

    @pytest.mark.parametrize("when", ["live", "committed", "ended", "edge lost"])
    def test_i2_a_scatter_that_fails_ends_its_lease_and_its_blocks_are_free(self, when: str) -> None:
        """Whatever else happened meanwhile: nothing writes any more, and they are no cached prefix."""
        one, blocks = intake()
        grant = granted(one, list(range(8)))
        open_at(one, grant, in_place=False)
        one.from_peer(P, offer(0, 0, 2), 1.0)
        one.posted(P, moved(0, 0, 2))
        one.staged(P, Staged(moved(0, 0, 2), 7, 20))
        if when == "committed":
            one.from_peer(P, commit(grant, 8), 1.0)
        elif when == "ended":
            self.end(one)
        elif when == "edge lost":
            one.edge_down(P)
        actions = one.scatter_failed(P, moved(0, 0, 2), "copying KV on cuda:0 failed")
        failed = to_router(actions, AttemptFailed)
        if when == "ended":
            assert failed == []
        else:
            assert [(message.code, message.retryable) for message in failed] == [("kv_lost", True)]
        assert (blocks.counts().used, blocks.counts().cached, len(one._leases)) == (0, 0, 0)
        assert one.scatter_failed(P, moved(0, 0, 2), "again") == []  # stale
        assert one.num_stale == 1

    def test_a_scatter_that_fails_takes_no_complete_block_along(self) -> None:
        one, blocks = intake()
        open_at(one, granted(one, list(range(12))), in_place=False)
        for index in range(2):
            one.from_peer(P, offer(index, index, 1), 1.0)
            one.posted(P, moved(index, index, 1))
            one.staged(P, Staged(moved(index, index, 1), 7 + index, 10))
        one.scattered(P, moved(0, 0, 1), 10, 1.0)
        one.scatter_failed(P, moved(1, 1, 1), "copying KV on cuda:0 failed")
        assert (blocks.counts().used, blocks.counts().cached) == (0, 1)

    def test_i3_a_lease_expires_unless_it_is_renewed(self) -> None:
        one, blocks = intake(max_ttl_s=8.0)
        grant = granted(one, list(range(4)), ttl_s=30.0)
        assert (grant.ttl_s, one._leases.next_deadline()) == (8.0, 8.0)
        one._leases.renew(ROUTER, RenewLeases(leases=[grant.lease, LeaseId(77)]), 5.0)
        assert one._leases.expire(12.9) == []
        failed = to_router(one._leases.expire(13.0), AttemptFailed)[0]
        assert (failed.code, failed.retryable) == ("lease_expired", True)
        assert blocks.counts().used == 0
        assert one._leases.next_deadline() is None


def test_the_table() -> None:
    assert TRANSITIONS.keys() == set(LeaseState)
    assert LeaseState.STARTED not in TRANSITIONS[LeaseState.RECEIVING]  # I5: never without a commit
    one, _ = intake()
    granted(one, [1])
    lease = one._leases.of_request(R1)
    assert lease is not None
    assert isinstance(lease.sequence, Sequence)
    with pytest.raises(IllegalLease, match="RESERVED -> COMMITTING"):
        lease.move(LeaseState.COMMITTING)
