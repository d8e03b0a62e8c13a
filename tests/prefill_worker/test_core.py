"""The prefill core, event by event: what it answers, what it frees and when."""

from __future__ import annotations

import pytest

from cluster.ids import Attempt, BlockId, Epoch, RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.kv_messages import (
    KvAbort,
    KvClosed,
    KvCommit,
    KvCommitted,
    KvOffer,
    KvOpen,
    KvOpened,
    KvRefused,
)
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Drain,
    Drained,
    Finish,
    FirstToken,
    PriorityClass,
    SloTargets,
    WorkerState,
)
from cluster.worker_io import (
    Action,
    Calibrated,
    EdgeDown,
    EdgeUp,
    FromPeer,
    FromRouter,
    OpenEdge,
    Peer,
    PieceSent,
    RouterLost,
    RunStep,
    SendPiece,
    StepFailed,
    Tick,
    ToPeer,
)
from prefill_worker.core import PrefillConfig, PrefillCore
from tests.support.worker_messages import (
    A1,
    R1,
    ROUTER,
    D,
    only,
    plan_of,
    prefill,
    step_done,
    to_peer,
    to_router,
)


def core(num_blocks: int = 16, **config: int) -> tuple[PrefillCore, BlockManager]:
    blocks = BlockManager(num_blocks, 4, "m")
    return PrefillCore(PrefillConfig(block_bytes=10, max_step_tokens=8, **config), blocks), blocks


def opened(num_blocks: int, request: str = "r1") -> FromPeer:
    targets = [BlockId(50 + i) for i in range(num_blocks)]
    return FromPeer(D, KvOpened(request=R1, attempt=A1, block_ids=targets))


def abort() -> FromRouter:
    return FromRouter(ROUTER, Abort(request=R1, attempt=A1, reason="the client left"))


def finish_sends(one: PrefillCore, actions: list[Action]) -> list[Action]:
    """Complete sends until none is begun; all other actions."""
    out: list[Action] = []
    queue = list(actions)
    while queue:
        action = queue.pop(0)
        if isinstance(action, SendPiece):
            queue += one.handle(PieceSent(action.peer, action.piece, 10), 0.0)
        else:
            out.append(action)
    return out


def test_the_whole_life_of_an_attempt() -> None:
    one, blocks = core()
    actions = one.handle(prefill(list(range(10))), 1.0)
    assert only(actions, OpenEdge).peer == D
    plan = plan_of(actions)
    assert plan is not None
    assert plan.num_tokens == 8
    assert to_peer(one.handle(EdgeUp(D, True), 1.0), KvOpen)[0].lease == 1
    assert one.handle(opened(3), 1.0) == []
    actions = one.handle(step_done(plan), 2.0)
    assert only(actions, SendPiece).piece.num_blocks == 2
    plan = plan_of(actions)
    assert plan is not None
    finish_sends(one, actions)
    actions = one.handle(step_done(plan, token=5), 3.0)
    first = to_router(actions, FirstToken)[0]
    assert (first.output.token_id, first.finish_reason, first.queue_s, first.prefill_s) == (5, None, 0.0, 2.0)
    assert not to_peer(actions, KvCommit)  # the router had token 0 before the transfer was through
    commit = to_peer(finish_sends(one, actions), KvCommit)[0]
    assert (commit.output.token_id, commit.num_tokens) == (5, 10)
    assert blocks.counts().used == 3
    assert one.handle(FromPeer(D, KvCommitted(request=R1, attempt=A1)), 4.0) == []
    assert blocks.counts().used == 0
    assert blocks.counts().cached == 2
    assert one.quiet()


def test_cached_blocks_are_sent_at_once_and_told_as_cached() -> None:
    one, blocks = core()
    test_tokens = list(range(12))
    held = blocks.allocate(2)
    assert held is not None
    blocks.publish(held, test_tokens[:8], "")
    blocks.release(held)
    plan = plan_of(one.handle(prefill(test_tokens), 0.0))
    assert plan is not None
    assert [(row.start, len(row.token_ids)) for row in plan.rows] == [(8, 4)]
    one.handle(EdgeUp(D, True), 0.0)
    piece = only(one.handle(opened(3), 0.0), SendPiece).piece
    assert (piece.first_block, piece.num_blocks) == (0, 2)  # while the step still runs
    first = to_router(one.handle(step_done(plan), 0.0), FirstToken)[0]
    assert first.cached_tokens == 8


@pytest.mark.parametrize("edge_is_up", [True, False])
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_tokens=1), FinishReason.LENGTH),
        (SamplingParams(max_tokens=9, eos_token_ids=(5,)), FinishReason.STOP),
        (SamplingParams(max_tokens=9, stop_token_ids=(5,)), FinishReason.STOP),
        (SamplingParams(max_tokens=9, eos_token_ids=(5,), min_tokens=3), None),
    ],
)
def test_b070_b072_token_0_may_end_the_request(
    edge_is_up: bool, params: SamplingParams, reason: FinishReason | None
) -> None:
    one, blocks = core()
    plan = plan_of(one.handle(prefill([1, 2, 3], params=params), 0.0))
    assert plan is not None
    if edge_is_up:
        one.handle(EdgeUp(D, True), 0.0)
        one.handle(opened(1), 0.0)
    actions = one.handle(step_done(plan, token=5), 0.0)
    assert to_router(actions, FirstToken)[0].finish_reason is reason
    if reason is None:
        assert blocks.counts().used == 1
        return
    assert not to_peer(actions, KvCommit)
    assert bool(to_peer(actions, KvAbort)) is edge_is_up
    assert bool(to_peer(actions, KvClosed)) is edge_is_up
    assert one.quiet()


@pytest.mark.parametrize("end", ["abort", "finish", "router", "d_abort"])
def test_blocks_stay_while_the_step_and_a_send_use_them(end: str) -> None:
    one, blocks = core()
    plan = plan_of(one.handle(prefill(list(range(12))), 0.0))
    assert plan is not None
    one.handle(EdgeUp(D, True), 0.0)
    one.handle(opened(3), 0.0)
    actions = one.handle(step_done(plan), 0.0)
    send = only(actions, SendPiece)
    assert plan_of(actions) is not None  # the second chunk runs
    event = {
        "abort": abort(),
        "finish": FromRouter(ROUTER, Finish(request=R1, attempt=A1)),
        "router": RouterLost(ROUTER),
        "d_abort": FromPeer(D, KvAbort(request=R1, attempt=A1, reason="expired")),
    }[end]
    actions = one.handle(event, 0.0)
    assert not to_peer(actions, KvClosed)
    assert bool(to_peer(actions, KvAbort)) is (end != "d_abort")
    assert bool(to_router(actions, AttemptFailed)) is (end == "d_abort")
    assert blocks.counts().used == 3
    plan = plan_of(one.handle(step_done(plan), 0.0))
    assert plan is None
    assert blocks.counts().used == 3  # the send still reads them
    actions = one.handle(PieceSent(D, send.piece, 20), 0.0)
    assert [type(m) for m in to_peer(actions, object)] == [KvClosed]
    assert one.quiet()


def test_b060_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    one, _ = core(num_blocks=4)
    failed = to_router(one.handle(prefill(list(range(17))), 0.0), AttemptFailed)[0]
    assert (failed.code, failed.retryable) == ("too_large", False)
    assert "17 tokens" in failed.message
    assert "16 tokens" in failed.message
    assert plan_of(one.handle(prefill([1], request="r2"), 0.0)) is not None


@pytest.mark.parametrize(("tokens", "skip"), [([1, 2, 3], 3), ([1, 2, 3], 4), ([], 0), ([-1], 0)])
def test_nonsense_is_refused(tokens: list[int], skip: int) -> None:
    one, _ = core()
    failed = to_router(one.handle(prefill(tokens, skip=skip), 0.0), AttemptFailed)[0]
    assert (failed.code, failed.retryable) == ("bad_request", False)
    assert one.quiet()


def test_edge_lost_fails_its_attempts_only() -> None:
    one, blocks = core()
    other = Peer(WorkerId("decode-1"), Epoch(1))
    plan = plan_of(one.handle(prefill(list(range(8))), 0.0))
    one.handle(prefill(list(range(100, 108)), request="r2", decode=other), 0.0)
    failed = to_router(one.handle(EdgeDown(D, "refused"), 0.0), AttemptFailed)
    assert [(f.request, f.code, f.retryable) for f in failed] == [("r1", "edge_lost", True)]
    assert plan is not None
    assert blocks.counts().used == 2  # r1 is still in the step
    plan = plan_of(one.handle(step_done(plan), 0.0))
    assert plan is not None
    assert [row.request for row in plan.rows] == ["r2"]


def test_an_edge_that_broke_under_a_writer_is_dialled_again_so_that_d_can_ask() -> None:
    one, _ = core()
    plan = plan_of(one.handle(prefill(list(range(4))), 0.0))
    one.handle(EdgeUp(D, True), 0.0)
    one.handle(opened(1), 0.0)
    one.handle(EdgeDown(D, "reset"), 1.0)
    assert plan is not None
    one.handle(step_done(plan), 1.0)
    for delay_s in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        start = one.next_deadline()
        assert start is not None
        assert only(one.handle(Tick(), start), OpenEdge).peer == D
        assert one.next_deadline() is None
        one.handle(EdgeDown(D, "refused"), start)
        if delay_s < 8.0:
            assert one.next_deadline() == start + delay_s * 2
    assert one.quiet()  # given up: that worker is dead


def test_a_closed_that_was_lost_with_its_edge_is_told_again() -> None:
    """Router and D are cut off at once; P hears of the router first and tells D, into a broken stream."""
    one, blocks = core()
    plan = plan_of(one.handle(prefill(list(range(4))), 0.0))
    one.handle(EdgeUp(D, True), 0.0)
    one.handle(opened(1), 0.0)
    assert plan is not None
    one.handle(step_done(plan), 0.0)
    actions = finish_sends(one, one.handle(RouterLost(ROUTER), 1.0))
    one.handle(EdgeDown(D, "reset"), 1.0)
    start = one.next_deadline()
    assert start is not None, (actions, "D may never have heard it")
    assert only(one.handle(Tick(), start), OpenEdge).peer == D
    one.handle(EdgeUp(D, True), start)
    answer = one.handle(FromPeer(D, KvAbort(request=R1, attempt=A1, reason="the edge was lost")), start)
    assert to_peer(answer, KvClosed)
    assert blocks.counts().used == 0
    one.handle(EdgeDown(D, "reset"), start)
    assert one.next_deadline() is not None, "the second one may be lost as well"


def test_d_is_told_closed_for_what_is_not_here_any_more() -> None:
    one, _ = core()
    actions = one.handle(FromPeer(D, KvAbort(request=R1, attempt=A1, reason="lost edge")), 0.0)
    assert [a.message for a in actions if isinstance(a, ToPeer)] == [KvClosed(request=R1, attempt=A1)]


def test_b085_silent_decode_worker_fails_the_attempt_at_its_deadline() -> None:
    one, blocks = core()
    plan = plan_of(one.handle(prefill(list(range(4))), 0.0))
    one.handle(EdgeUp(D, True), 1.0)
    assert one.next_deadline() == 11.0
    assert one.handle(Tick(), 10.9) == []
    actions = one.handle(Tick(), 11.0)
    failed = to_router(actions, AttemptFailed)[0]
    assert (failed.code, failed.retryable) == ("peer_silent", True)
    assert "decode-0" in failed.message
    assert [type(m) for m in to_peer(actions, object)] == [KvAbort, KvClosed]
    assert plan is not None
    one.handle(step_done(plan), 11.0)
    assert blocks.counts().used == 0
    assert one.handle(opened(1), 12.0) == []  # late: dropped and counted
    assert one.load().stale_messages == 1
    assert one.quiet()


def test_a_refused_open_fails_the_attempt() -> None:
    one, _ = core()
    one.handle(prefill(list(range(4))), 0.0)
    one.handle(EdgeUp(D, True), 0.0)
    actions = one.handle(FromPeer(D, KvRefused(request=R1, attempt=A1, reason="no lease")), 0.0)
    assert to_router(actions, AttemptFailed)[0].code == "lease_lost"
    assert not to_peer(actions, object)


def test_wrong_number_of_target_blocks_fails_closed() -> None:
    one, _ = core()
    one.handle(prefill(list(range(8))), 0.0)
    one.handle(EdgeUp(D, True), 0.0)
    actions = one.handle(opened(1), 0.0)
    assert to_router(actions, AttemptFailed)[0].code == "kv_mismatch"
    assert [type(m) for m in to_peer(actions, object)] == [KvAbort, KvClosed]


def test_a_failed_step_fails_its_rows_and_the_worker_goes_on() -> None:
    one, blocks = core()
    one.handle(prefill(list(range(8))), 0.0)
    one.handle(prefill([1], request="r2"), 0.0)
    actions = one.handle(StepFailed("boom"), 0.0)
    failed = to_router(actions, AttemptFailed)
    assert [(f.request, f.code) for f in failed] == [("r1", "step_failed")]
    assert "boom" in failed[0].message
    assert blocks.counts().cached == 0
    plan = plan_of(actions)
    assert plan is not None
    assert [row.request for row in plan.rows] == ["r2"]


def test_b087_duplicates_and_stale_attempts_are_counted_and_change_nothing() -> None:
    one, _ = core()
    event = prefill(list(range(4)), attempt=2)
    plan = plan_of(one.handle(event, 0.0))
    assert plan is not None
    one.handle(EdgeUp(D, True), 0.0)
    stale = [
        event,
        prefill(list(range(4)), attempt=1),
        abort(),
        FromPeer(D, KvCommitted(request=R1, attempt=Attempt(2))),
        FromPeer(
            Peer(WorkerId("decode-9"), Epoch(1)), KvOpened(request=R1, attempt=Attempt(2), block_ids=[])
        ),
        FromRouter(RouterId("other"), Abort(request=R1, attempt=Attempt(2), reason="not yours")),
    ]
    for late in stale:
        assert one.handle(late, 0.0) == []
    assert one.load().stale_messages == len(stale)
    assert to_router(one.handle(step_done(plan), 0.0), FirstToken)


def test_a_newer_attempt_ends_the_older_one() -> None:
    one, blocks = core()
    plan = plan_of(one.handle(prefill(list(range(4))), 0.0))
    one.handle(EdgeUp(D, True), 0.0)
    actions = one.handle(prefill(list(range(4)), attempt=2), 0.0)
    assert [(type(m), m.attempt) for m in to_peer(actions, object)] == [  # type: ignore[attr-defined]
        (KvAbort, 1),
        (KvClosed, 1),
        (KvOpen, 2),
    ]
    assert plan is not None
    actions = one.handle(step_done(plan), 0.0)
    assert not to_router(actions, FirstToken)
    again = plan_of(actions)
    assert again is not None
    assert again.rows[0].attempt == 2
    assert blocks.counts().used == 1


def test_an_older_attempt_may_outlive_the_newer_one() -> None:
    """Its decode worker hangs with an offer unanswered, while the next attempt is through elsewhere."""
    one, blocks = core()
    plan = plan_of(one.handle(prefill([1, 2, 3], params=SamplingParams(max_tokens=9)), 0.0))
    assert plan is not None
    one.handle(EdgeUp(D, False), 0.0)
    one.handle(opened(1), 0.0)
    offer = only(one.handle(step_done(plan), 0.0), ToPeer).message
    assert isinstance(offer, KvOffer)
    one.handle(abort(), 0.0)
    second, other = Attempt(2), Peer(WorkerId("decode-1"), Epoch(1))
    plan = plan_of(one.handle(prefill([1, 2, 3], attempt=2, decode=other), 0.0))
    assert plan is not None
    one.handle(EdgeUp(other, True), 0.0)
    one.handle(FromPeer(other, KvOpened(request=R1, attempt=second, block_ids=[BlockId(1)])), 0.0)
    finish_sends(one, one.handle(step_done(plan), 0.0))
    one.handle(FromPeer(other, KvCommitted(request=R1, attempt=second)), 0.0)
    assert blocks.counts().used == 1
    refused = KvRefused(request=R1, attempt=A1, piece=offer.piece, reason="the lease is over")
    assert to_peer(one.handle(FromPeer(D, refused), 1.0), KvClosed)
    assert blocks.counts().used == 0
    assert one.quiet()


def test_pieces_in_flight_are_bounded_per_edge_and_in_order_of_arrival() -> None:
    one, _ = core(max_pieces_in_flight=2, max_piece_bytes=10)
    plan = plan_of(one.handle(prefill(list(range(8))), 0.0))
    one.handle(EdgeUp(D, True), 0.0)
    one.handle(opened(2), 0.0)
    assert plan is not None
    plan = plan_of(one.handle(prefill(list(range(50, 58)), request="r2"), 0.0)) or plan
    sends = [a for a in one.handle(step_done(plan), 0.0) if isinstance(a, SendPiece)]
    assert [(s.piece.request, s.piece.index) for s in sends] == [("r1", 0), ("r1", 1)]


def test_drain_refuses_new_work_finishes_the_old_and_says_so() -> None:
    one, _ = core()
    plan = plan_of(one.handle(prefill([1, 2], params=SamplingParams(max_tokens=1)), 0.0))
    assert one.handle(FromRouter(ROUTER, Drain(grace_s=5.0)), 0.0) == []
    assert one.state() is WorkerState.DRAINING
    refused = to_router(one.handle(prefill([1], request="r2"), 0.0), AttemptFailed)[0]
    assert (refused.code, refused.retryable) == ("draining", True)
    assert plan is not None
    actions = one.handle(step_done(plan), 1.0)
    assert len(to_router(actions, FirstToken)) == len(to_router(actions, Drained)) == 1
    assert one.quiet()


def test_drain_gives_up_after_the_grace_time() -> None:
    one, _ = core()
    one.handle(prefill([1, 2]), 0.0)
    one.handle(EdgeUp(D, True), 0.0)
    one.handle(FromRouter(ROUTER, Drain(grace_s=5.0)), 0.0)
    assert one.next_deadline() == 5.0
    actions = one.handle(Tick(), 5.0)
    assert to_router(actions, AttemptFailed)[0].code == "draining"
    assert not to_router(actions, Drained)  # the step still runs
    done = [a for a in actions if isinstance(a, RunStep)]
    assert not done


def test_what_a_request_was_promised_decides_who_is_next() -> None:
    one, _ = core(num_blocks=64)
    plan = plan_of(one.handle(prefill(list(range(8))), 0.0))
    assert plan is not None
    one.handle(prefill([20 + i for i in range(12)], request="r2"), 0.0)
    soon = SloTargets(ttft_deadline_in_s=0.5, tpot_s=0.1)
    one.handle(prefill([40 + i for i in range(12)], request="r3", slo=soon), 0.0)
    batch = SloTargets(ttft_deadline_in_s=0.4, tpot_s=0.1, priority_class=PriorityClass.BATCH)
    one.handle(prefill([60], request="r4", slo=batch), 0.0)
    order: list[str] = []
    while (plan := plan_of(one.handle(step_done(plan), 0.0))) is not None:
        order += [row.request for row in plan.rows if row.request not in order]
    assert order == ["r3", "r2", "r4"]


def test_a_calibration_is_what_the_router_hears_and_what_sizes_steps() -> None:
    blocks = BlockManager(64, 4, "m")
    one = PrefillCore(PrefillConfig(block_bytes=10, targets=Targets(2.0, 0.05)), blocks)
    slow = StepModel(1e-3, 1e-3, 5e-3, 0.0, 0.0)
    assert one.load().step_model is None
    assert one.handle(Calibrated(slow), 0.0) == []
    assert one.load().step_model == slow
    plan = plan_of(one.handle(prefill(list(range(200))), 0.0))
    assert plan is not None
    assert plan.num_tokens == 19  # a tenth of a second, a twentieth of the time to the first token
