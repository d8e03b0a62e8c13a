"""The decode core, event by event: what the router hears, and when everything is free again."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.engine.batch import StepPlan
from cluster.ids import Attempt, PieceIndex, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from cluster.step_model import StepModel
from cluster.wire.kv_messages import KvAbort, KvClosed, KvCommit, KvOpen, KvPiece
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Drain,
    Drained,
    Finish,
    FirstToken,
    Grant,
    Nack,
    NackReason,
    PriorityClass,
    SloTargets,
    Tokens,
    WorkerState,
)
from cluster.worker_io import Calibrated, EdgeUp, FromPeer, FromRouter, RouterLost, StepFailed, Tick, ToRouter
from decode_worker.core import DecodeConfig, DecodeCore
from tests.support.worker_messages import A1, R1, ROUTER, P, plan_of, reserve, step_done, to_peer, to_router

OTHER = RouterId("router-1")


def core(num_blocks: int = 64, **config: Any) -> tuple[DecodeCore, BlockManager]:
    blocks = BlockManager(num_blocks, 4, "m")
    return DecodeCore(DecodeConfig(block_bytes=10, **config), blocks), blocks


def local(
    one: DecodeCore, request: str = "r1", *, router: RouterId = ROUTER, **fields: Any
) -> StepPlan | None:
    actions = one.handle(reserve([1, 2, 3], request=request, local=True, router=router, **fields), 0.0)
    assert to_router(actions, Grant)
    return plan_of(actions)


def to_decoding(one: DecodeCore, requests: dict[str, RouterId]) -> StepPlan:
    """Local prefills until all of them decode; the plan of the next step."""
    plan = None
    for request, router in requests.items():
        plan = local(one, request, router=router) or plan
    for _ in range(20):
        assert plan is not None
        if len(plan.rows) == len(requests) and all(row.start >= 3 for row in plan.rows):
            return plan
        plan = plan_of(one.handle(step_done(plan), 0.0))
    raise AssertionError("they never decode together")


def test_a_local_prefill_says_what_a_remote_one_would_have() -> None:
    one, _ = core()
    plan = local(one)
    assert plan is not None
    actions = one.handle(step_done(plan, token=5), 2.0)
    assert [type(a.message) for a in actions if isinstance(a, ToRouter)] == [FirstToken, Committed]
    first, committed = to_router(actions, FirstToken)[0], to_router(actions, Committed)[0]
    assert (first.output.token_id, first.prefill_s, first.cached_tokens) == (5, 2.0, 0)
    assert (committed.kv_bytes, committed.kv_transfer_s) == (0, 0.0)
    plan = plan_of(actions)
    assert plan is not None
    row = to_router(one.handle(step_done(plan, token=6), 2.0), Tokens)[0].rows[0]
    assert (row.index, row.outputs, row.finish_reason) == (1, [TokenOutput(6)], None)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_tokens=1), FinishReason.LENGTH),
        (SamplingParams(max_tokens=9, stop_token_ids=(5,)), FinishReason.STOP),
    ],
)
def test_b070_b072_token_0_of_a_local_prefill_may_end_it(
    params: SamplingParams, reason: FinishReason
) -> None:
    one, _ = core()
    plan = local(one, params=params)
    assert plan is not None
    actions = one.handle(step_done(plan, token=5), 0.0)
    assert to_router(actions, FirstToken)[0].finish_reason is reason
    assert not to_router(actions, Committed)
    assert one.quiet()


def test_one_tokens_message_per_router_and_step() -> None:
    one, _ = core()
    plan = to_decoding(one, {"r1": ROUTER, "r2": OTHER, "r3": ROUTER})
    actions = one.handle(step_done(plan), 0.0)
    sent = {a.router: a.message for a in actions if isinstance(a, ToRouter)}
    assert len([a for a in actions if isinstance(a, ToRouter)]) == 2
    rows = {router: [row.request for row in m.rows] for router, m in sent.items() if isinstance(m, Tokens)}
    assert rows == {ROUTER: ["r1", "r3"], OTHER: ["r2"]}


def test_abort_frees_at_once_unless_the_step_runs() -> None:
    one, blocks = core()
    plan = to_decoding(one, {"r1": ROUTER})
    one.handle(FromRouter(ROUTER, Abort(request=R1, attempt=A1, reason="left")), 0.0)
    assert blocks.counts().used == 3
    actions = one.handle(step_done(plan), 0.0)
    assert not to_router(actions, Tokens)
    assert plan_of(actions) is None
    assert one.quiet()
    one.handle(reserve([1, 2, 3], attempt=2), 0.0)
    assert blocks.counts().used == 2
    assert one.handle(FromRouter(ROUTER, Finish(request=R1, attempt=Attempt(2))), 0.0) == []
    assert one.quiet()


def test_b087_abort_in_the_step_that_ends_it_both_orders() -> None:
    for abort_first in (True, False):
        one, _ = core()
        abort = FromRouter(ROUTER, Abort(request=R1, attempt=A1, reason="left"))
        plan = local(one, params=SamplingParams(max_tokens=1))
        assert plan is not None
        events = [abort, step_done(plan)] if abort_first else [step_done(plan), abort]
        told = [bool(to_router(one.handle(event, 0.0), FirstToken)) for event in events]
        assert any(told) is not abort_first
        assert one.handle(abort, 0.0) == []
        assert one.load().stale_messages == (1 if abort_first else 2)
        assert one.quiet()


def test_a_failed_step_fails_its_requests_and_the_worker_goes_on() -> None:
    one, _ = core()
    to_decoding(one, {"r1": ROUTER, "r2": OTHER})
    actions = one.handle(StepFailed("boom"), 0.0)
    failed = to_router(actions, AttemptFailed)
    assert [(f.request, f.code, f.retryable) for f in failed] == [
        ("r1", "step_failed", True),
        ("r2", "step_failed", True),
    ]
    assert one.quiet()
    assert local(one, "r3") is not None


def test_router_lost_frees_everything_of_it_and_nothing_else() -> None:
    one, blocks = core()
    plan = to_decoding(one, {"r1": ROUTER, "r2": OTHER})
    one.handle(reserve([1] * 9, request="r3"), 0.0)
    one.handle(reserve([2] * 9, request="r4", router=OTHER), 0.0)
    one.handle(RouterLost(ROUTER), 0.0)
    actions = one.handle(step_done(plan), 0.0)
    assert [row.request for m in to_router(actions, Tokens) for row in m.rows] == ["r2"]
    assert one.load().leases == 1
    assert one.load().running == 1
    one.handle(RouterLost(OTHER), 0.0)
    plan = plan_of(actions)
    assert plan is not None
    one.handle(step_done(plan), 0.0)
    assert one.quiet()
    blocks.check_integrity()


def test_a_newer_attempt_fences_the_older_one_wherever_it_is() -> None:
    one, blocks = core()
    one.handle(reserve([1] * 9), 0.0)
    one.handle(EdgeUp(P, True), 0.0)
    grant = 1
    one.handle(FromPeer(P, KvOpen(request=R1, attempt=A1, lease=grant)), 0.0)  # type: ignore[arg-type]
    actions = one.handle(reserve([1] * 9, attempt=2), 0.0)
    assert to_peer(actions, KvAbort)[0].attempt == 1
    assert to_router(actions, Grant)[0].attempt == 2
    assert blocks.counts().used == 8  # the old blocks wait for their writer
    late = KvPiece(request=R1, attempt=A1, piece=PieceIndex(0), first_block=0, num_blocks=1, num_bytes=10)
    commit = KvCommit(request=R1, attempt=A1, lease=grant, output=TokenOutput(1), num_tokens=9)  # type: ignore[arg-type]
    assert one.handle(FromPeer(P, late), 0.0) == one.handle(FromPeer(P, commit), 0.0) == []
    assert one.handle(reserve([1] * 9, attempt=1), 0.0) == []
    assert one.load().stale_messages == 3
    one.handle(FromPeer(P, KvClosed(request=R1, attempt=A1)), 0.0)
    assert blocks.counts().used == 4
    one.handle(FromRouter(ROUTER, Abort(request=R1, attempt=Attempt(2), reason="left")), 0.0)
    assert one.quiet()


def test_b060_too_large_at_once_and_others_go_on() -> None:
    one, _ = core(num_blocks=4, max_num_seqs=1)
    assert local(one) is not None
    nack = to_router(one.handle(reserve([1] * 17, request="r2"), 0.0), Nack)[0]
    assert nack.reason is NackReason.TOO_LARGE  # not NO_SLOT: waiting would not help
    nack = to_router(one.handle(reserve([1], request="r3"), 0.0), Nack)[0]
    assert nack.reason is NackReason.NO_SLOT


def test_drain_finishes_what_runs_then_says_so_once() -> None:
    one, _ = core()
    plan = local(one, params=SamplingParams(max_tokens=1))
    assert plan is not None
    one.handle(FromRouter(OTHER, Drain(grace_s=5.0)), 0.0)
    assert one.state() is WorkerState.DRAINING
    nack = to_router(one.handle(reserve([1], request="r2"), 0.0), Nack)[0]
    assert nack.reason is NackReason.DRAINING
    actions = one.handle(step_done(plan), 0.0)
    drained = [a.router for a in actions if isinstance(a, ToRouter) and isinstance(a.message, Drained)]
    assert drained == [ROUTER, OTHER]
    assert one.handle(Tick(), 9.0) == []
    assert one.quiet()


def test_drain_gives_up_after_the_grace_time_even_if_a_writer_stays_silent() -> None:
    one, blocks = core()
    one.handle(reserve([1] * 9), 0.0)
    one.handle(EdgeUp(P, True), 0.0)
    one.handle(FromPeer(P, KvOpen(request=R1, attempt=A1, lease=1)), 0.0)  # type: ignore[arg-type]
    one.handle(FromRouter(ROUTER, Drain(grace_s=5.0)), 0.0)
    assert one.next_deadline() == 5.0
    actions = one.handle(Tick(), 5.0)
    assert to_router(actions, AttemptFailed)[0].code == "draining"
    assert to_router(actions, Drained)
    assert blocks.counts().used == 4
    assert one.next_deadline() is None


# ---- targets and the step model ------------------------------------------------------------------

LAPTOP = StepModel(2e-3, 8e-3, 1e-3, 1e-6, 1e-8)


def test_the_targets_of_a_stream_size_the_chunks_beside_it() -> None:
    def chunk_beside(tpot_s: float) -> int:
        one, _ = core(num_blocks=256)
        assert one.handle(Calibrated(LAPTOP), 0.0) == []
        slo = SloTargets(ttft_deadline_in_s=1.0, tpot_s=tpot_s)
        plan = local(one, slo=slo)
        assert plan is not None
        one.handle(reserve(list(range(600)), request="r2", local=True), 0.0)
        actions = one.handle(step_done(plan), 0.0)
        plan = plan_of(actions)
        assert plan is not None
        assert [row.request for row in plan.rows] == ["r1", "r2"]
        return len(plan.rows[1].token_ids)

    assert chunk_beside(0.03) < 40 < 150 < chunk_beside(0.2)


def test_token_0_of_a_remote_prompt_came_when_it_was_sampled() -> None:
    one, _ = core()
    grant = to_router(
        one.handle(reserve([1, 2, 3, 4], slo=SloTargets(ttft_deadline_in_s=2.0, tpot_s=0.1)), 0.0), Grant
    )[0]
    one.handle(EdgeUp(P, in_place=True), 1.0)
    one.handle(FromPeer(P, KvOpen(request=R1, attempt=A1, lease=grant.lease)), 1.0)
    piece = KvPiece(request=R1, attempt=A1, piece=PieceIndex(0), first_block=0, num_blocks=1, num_bytes=10)
    one.handle(FromPeer(P, piece), 2.5)
    commit = KvCommit(
        request=R1, attempt=A1, lease=grant.lease, output=TokenOutput(1), num_tokens=4, token_age_s=0.75
    )
    one.handle(FromPeer(P, commit), 2.5)
    [sequence] = one._scheduler.sequences()
    assert sequence.pace.origin_s == 1.75
    assert not sequence.pace.yields  # it was in time, whatever the transfer took


def test_the_load_says_what_placement_needs_to_know() -> None:
    one, _ = core(num_blocks=256)
    assert one.load().step_model is None
    one.handle(Calibrated(LAPTOP), 0.0)
    plan = local(one)
    assert plan is not None
    one.handle(reserve([9] * 7, request="r2"), 0.0)
    batch = SloTargets(ttft_deadline_in_s=9.0, tpot_s=1.0, priority_class=PriorityClass.BATCH)
    one.handle(reserve([8] * 500, request="r3", local=True, slo=batch), 0.0)
    one.handle(reserve([7] * 100, request="r4", local=True), 0.0)
    one.handle(step_done(plan), 0.0)
    load = one.load()
    assert load.step_model == LAPTOP
    assert (load.decode_rows, load.decode_context) == (1, 4)
    assert (load.coming_rows, load.coming_context) == (1, 7)
    assert load.on_time_prefill_s == pytest.approx(0.1, rel=0.05)
    assert load.late_prefill_s == pytest.approx(0.5, rel=0.05)
    assert load.queued_load_s == pytest.approx(1e-3 + 1e-6 * 100)
    assert load.row_life_s == 0.0
