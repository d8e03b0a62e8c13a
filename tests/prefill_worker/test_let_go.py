"""Edges that nobody uses are let go for a reason; whoever comes meanwhile waits for the next one and loses
nothing."""

from __future__ import annotations

from typing import TypeVar

from cluster.engine.batch import StepPlan
from cluster.ids import Epoch, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_messages import KvMakeRoom, KvOpen
from cluster.wire.messages import AttemptFailed, DecodePartner, Partners
from cluster.worker_io import (
    Action,
    CloseEdge,
    EdgeDown,
    EdgeUp,
    FromPeer,
    FromRouter,
    OpenEdge,
    Peer,
    RouterLost,
    Tick,
)
from prefill_worker.core import PrefillConfig, PrefillCore
from prefill_worker.edges import LOOK_AGAIN_S
from tests.support.worker_messages import ROUTER, only, plan_of, prefill, step_done, to_peer, to_router

T = TypeVar("T")
ME = WorkerId("prefill-0")
D0, D1, D2 = (Peer(WorkerId(f"decode-{i}"), Epoch(1)) for i in range(3))


def core() -> PrefillCore:
    return PrefillCore(PrefillConfig(block_bytes=10), BlockManager(64, 4, "m"))


def partners(*peers: Peer) -> FromRouter:
    decode = [DecodePartner(peer.worker, peer.epoch, f"unix:/{peer.worker}") for peer in peers]
    return FromRouter(ROUTER, Partners(prefill=[ME], decode=decode))


def of(actions: list[Action], kind: type[T]) -> list[T]:
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


CROWDED = "this worker holds 2 edges, as many as it may"


def full() -> PrefillCore:
    """Holds two capped edges, as many as it may; D0's was used last."""
    one = core()
    for number, peer in enumerate((D0, D1, D0)):
        if number < 2:
            bring_up(one, float(number), EdgeUp(peer, False, is_capped=True))
        else:
            actions = one.handle(prefill([1, 2, 3, 4], request="again", decode=peer), float(number))
            plan = plan_of(actions)
            assert plan is not None
            end(one, plan, float(number))
    return one


def crowd(one: PrefillCore, now: float) -> list[Action]:
    """An attempt for a third decode worker, for which there is no room."""
    one.handle(prefill([9, 9, 9, 9], request="new", decode=D2), now)
    return one.handle(EdgeDown(D2, CROWDED, is_crowded=True), now)


def test_the_idle_edge_whose_last_use_is_longest_ago_makes_room() -> None:
    one = full()
    assert crowd(one, 5.0) == [CloseEdge(D1, "it makes room for one to `decode-2`")]
    dial = only(one.handle(EdgeDown(D1, "it makes room"), 5.5), OpenEdge)
    assert dial == OpenEdge(D2, "addr", timeout_s=9.5)  # in what is left of the attempt's time
    assert to_peer(one.handle(EdgeUp(D2, False, is_capped=True), 5.6), KvOpen)


def test_an_edge_in_use_makes_no_room() -> None:
    one = full()
    one.handle(prefill([1, 2, 3, 4], request="on D1", decode=D1), 4.0)
    assert of(crowd(one, 5.0), CloseEdge) == [CloseEdge(D0, "it makes room for one to `decode-2`")]


def test_where_all_are_in_use_another_kind_is_dialled_and_only_once() -> None:
    one = full()
    for peer in (D0, D1):
        one.handle(prefill([1, 2, 3, 4], request=f"on {peer.worker}", decode=peer), 4.0)
    assert only(crowd(one, 5.0), OpenEdge) == OpenEdge(D2, "addr", timeout_s=10.0, uncapped=True)
    failed = one.handle(EdgeDown(D2, CROWDED, is_crowded=True), 6.0)  # there is no other kind
    assert of(failed, OpenEdge) == []
    assert [one.code for one in to_router(failed, AttemptFailed)] == ["edge_lost"]


def test_an_edge_that_becomes_busy_while_it_makes_room_is_dialled_again() -> None:
    """Both attempts go on: the one that needed room first."""
    one = full()
    crowd(one, 5.0)
    came = one.handle(prefill([1, 2, 3, 4], request="late", decode=D1), 5.1)
    assert not to_peer(came, KvOpen)
    down = one.handle(EdgeDown(D1, "it makes room"), 5.2)
    assert [dial.peer for dial in of(down, OpenEdge)] == [D2, D1]
    assert not to_router(down, AttemptFailed)
    one.handle(EdgeUp(D2, False, is_capped=True), 5.3)
    again = one.handle(EdgeDown(D1, CROWDED, is_crowded=True), 5.4)
    assert of(again, CloseEdge) == [CloseEdge(D0, "it makes room for one to `decode-1`")]
    down = one.handle(EdgeDown(D0, "it makes room"), 5.5)
    assert [dial.peer for dial in of(down, OpenEdge)] == [D1]
    assert to_peer(one.handle(EdgeUp(D1, False, is_capped=True), 5.6), KvOpen)


def test_room_that_nobody_needs_any_more_stays_free() -> None:
    one = full()
    actions = one.handle(prefill([9, 9, 9, 9], request="new", decode=D2), 5.0)
    plan = plan_of(actions)
    assert plan is not None
    one.handle(EdgeDown(D2, CROWDED, is_crowded=True), 5.0)
    end(one, plan, 5.1)
    assert one.handle(EdgeDown(D1, "it makes room"), 5.2) == []
    assert only(one.handle(prefill([9, 9, 9, 9], request="newer", decode=D2), 6.0), OpenEdge).peer == D2


def test_an_edge_that_nobody_needs_yet_takes_no_place_of_another() -> None:
    one = PrefillCore(PrefillConfig(block_bytes=10, worker=ME, warm_edges=16), BlockManager(64, 4, "m"))
    one.handle(partners(D0), 0.0)
    one.handle(EdgeUp(D0, False, is_capped=True), 0.0)
    one.handle(partners(D0, D1), 1.0)
    assert one.handle(EdgeDown(D1, CROWDED, is_crowded=True), 1.1) == []


def test_an_edge_of_a_kind_that_is_not_capped_makes_no_room() -> None:
    one = core()
    bring_up(one, 0.0, EdgeUp(D0, False))
    bring_up(one, 1.0, EdgeUp(D1, True))
    assert only(crowd(one, 2.0), OpenEdge).uncapped


def test_an_idle_edge_gives_way_when_its_decode_worker_asks_and_one_in_use_does_not() -> None:
    one = core()
    bring_up(one, 0.0, EdgeUp(D1, False, is_capped=True))
    actions = one.handle(prefill([1, 2, 3, 4], request="again", decode=D1), 1.0)
    assert one.handle(FromPeer(D1, KvMakeRoom()), 1.1) == []
    plan = plan_of(actions)
    assert plan is not None
    end(one, plan, 2.0)
    gone = one.handle(FromPeer(D1, KvMakeRoom()), 2.1)
    assert gone == [CloseEdge(D1, "the decode worker needs room for another")]
    assert one.handle(FromPeer(D1, KvMakeRoom()), 2.2) == []  # it is on its way
    one.handle(prefill([1, 2, 3, 4], request="late", decode=D1), 2.3)
    assert only(one.handle(EdgeDown(D1, "room"), 2.4), OpenEdge).peer == D1


def test_an_edge_that_works_in_place_gives_no_way() -> None:
    """Closing it would prove nothing to the decode worker."""
    one = core()
    bring_up(one, 0.0, EdgeUp(D1, True))
    assert one.handle(FromPeer(D1, KvMakeRoom()), 1.0) == []
