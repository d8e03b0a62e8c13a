"""Edges that nobody uses are let go for a reason; whoever comes meanwhile waits for the next one and loses
nothing."""

from __future__ import annotations

from cluster.engine.batch import StepPlan
from cluster.ids import Epoch, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_messages import KvOpen
from cluster.wire.messages import AttemptFailed
from cluster.worker_io import Action, CloseEdge, EdgeDown, EdgeUp, OpenEdge, Peer, RouterLost, Tick
from prefill_worker.core import PrefillConfig, PrefillCore
from prefill_worker.edges import LOOK_AGAIN_S
from tests.support.worker_messages import ROUTER, only, plan_of, prefill, step_done, to_peer, to_router

D0, D1, D2 = (Peer(WorkerId(f"decode-{i}"), Epoch(1)) for i in range(3))


def core() -> PrefillCore:
    return PrefillCore(PrefillConfig(block_bytes=10), BlockManager(64, 4, "m"))


def of(actions: list[Action], kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def begin(one: PrefillCore, peer: Peer, now: float) -> StepPlan:
    """An attempt for `peer`, which has to be dialled; the step that computes its prompt."""
    actions = one.handle(prefill([1, 2, 3, 4], request=f"for {peer.worker}", decode=peer), now)
    assert only(actions, OpenEdge).peer == peer
    plan = plan_of(actions)
    assert plan is not None
    return plan


def end(one: PrefillCore, plan: StepPlan, now: float) -> None:
    """Nobody wants it any more."""
    one.handle(RouterLost(ROUTER), now)
    one.handle(step_done(plan), now)
    assert one.quiet()


def bring_up(one: PrefillCore, now: float, up: EdgeUp) -> None:
    """By an attempt that ends at once."""
    plan = begin(one, up.peer, now)
    one.handle(up, now)
    end(one, plan, now)


def test_an_edge_of_a_kind_that_stands_in_is_exchanged_when_nobody_uses_it() -> None:
    one = core()
    bring_up(one, 0.0, EdgeUp(D1, False, better_after_s=30.0))
    assert one.next_deadline() == 30.0
    assert one.quiet()  # that is no work
    assert one.handle(Tick(), 29.0) == []
    assert one.handle(Tick(), 30.0) == [CloseEdge(D1, "a better kind of edge is tried again")]
    assert one.next_deadline() is None
    assert one.handle(EdgeDown(D1, "a better kind of edge is tried again"), 30.1) == []
    again = one.handle(prefill([1, 2, 3, 4], decode=D1), 31.0)
    assert only(again, OpenEdge).peer == D1
    one.handle(EdgeUp(D1, False), 31.1)
    assert one.next_deadline() == 41.1  # of the attempt alone: there is no better kind


def test_an_edge_in_use_is_left_alone_until_it_is_idle() -> None:
    one = core()
    plan = begin(one, D1, 0.0)
    one.handle(EdgeUp(D1, False, better_after_s=5.0), 0.0)
    assert one.handle(Tick(), 5.0) == []
    assert one.next_deadline() == 5.0 + LOOK_AGAIN_S
    end(one, plan, 5.5)
    assert of(one.handle(Tick(), 5.0 + LOOK_AGAIN_S), CloseEdge)


def test_an_attempt_that_comes_while_its_edge_is_let_go_waits_for_the_next_one() -> None:
    one = core()
    bring_up(one, 0.0, EdgeUp(D1, False, better_after_s=30.0))
    one.handle(Tick(), 30.0)
    came = one.handle(prefill([5, 6, 7, 8], decode=D1), 30.1)
    assert not of(came, OpenEdge)
    assert not to_peer(came, KvOpen)  # the edge is there, and would take it along
    down = one.handle(EdgeDown(D1, "a better kind of edge is tried again"), 30.2)
    dial = only(down, OpenEdge)
    assert (dial.peer, dial.timeout_s) == (D1, 40.1 - 30.2)
    assert not to_router(down, AttemptFailed)
    assert to_peer(one.handle(EdgeUp(D1, False), 30.3), KvOpen)
