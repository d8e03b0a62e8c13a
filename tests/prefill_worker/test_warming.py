"""Edges made beforehand: never more than may be, one at a time, and in nobody's way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import Epoch, RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.wire.kv_messages import KvOpen
from cluster.wire.messages import AttemptFailed, DecodePartner, Drain, Partners
from cluster.worker_io import (
    Action,
    EdgeDown,
    EdgeUp,
    FromRouter,
    OpenEdge,
    Peer,
    RouterLost,
    Tick,
)
from prefill_worker.core import PrefillConfig, PrefillCore
from prefill_worker.warming import MAX_DOUBLINGS, RETRY_S, chosen
from tests.support.worker_messages import ROUTER, D, only, plan_of, prefill, step_done, to_peer, to_router

ME = WorkerId("prefill-0")
OTHER_ROUTER = RouterId("router-1")
D1, D2 = (Peer(WorkerId(f"decode-{i}"), Epoch(1)) for i in (1, 2))


def names(role: str, count: int) -> list[WorkerId]:
    return sorted(WorkerId(f"{role}-{index}") for index in range(count))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_nobody_comes_to_hold_more_than_it_may(num_prefill: int, num_decode: int, max_edges: int) -> None:
    prefill_names, decode_names = names("prefill", num_prefill), names("decode", num_decode)
    edges = {name: chosen(name, prefill_names, decode_names, max_edges) for name in prefill_names}
    fits = max(num_prefill, num_decode) <= max_edges
    most = max_edges if fits else max_edges // 2  # the other half is left to requests
    held = dict.fromkeys(decode_names, 0)
    for one in edges.values():
        assert len(set(one)) == len(one) <= most
        assert not fits or len(one) == num_decode
        for name in one:
            held[name] += 1
    assert max(held.values(), default=0) <= most


def test_workers_begin_at_different_partners() -> None:
    prefill_names, decode_names = names("prefill", 3), names("decode", 3)
    first = [chosen(name, prefill_names, decode_names, 16)[0] for name in prefill_names]
    assert first == decode_names
    assert chosen(WorkerId("unknown"), prefill_names, decode_names, 16) == []
    assert chosen(ME, prefill_names, [], 16) == []


def warm_core(**config: int) -> PrefillCore:
    settings = PrefillConfig(block_bytes=10, max_step_tokens=8, worker=ME, **{"warm_edges": 16, **config})
    return PrefillCore(settings, BlockManager(16, 4, "m"))


def partners(*peers: Peer, router: RouterId = ROUTER) -> FromRouter:
    decode = [DecodePartner(peer.worker, peer.epoch, f"unix:/{peer.worker}") for peer in peers]
    return FromRouter(router, Partners(prefill=[ME], decode=decode))


def dials(actions: list[Action]) -> list[OpenEdge]:
    return [action for action in actions if isinstance(action, OpenEdge)]


def test_pairs_are_dialled_one_at_a_time_as_soon_as_both_are_there() -> None:
    one = warm_core()
    assert dials(one.handle(partners(D1, D2), 0.0)) == [OpenEdge(D1, "unix:/decode-1", warm=True)]
    assert dials(one.handle(partners(D1, D2), 0.1)) == []  # told again
    assert dials(one.handle(EdgeUp(D1, False), 0.2)) == [OpenEdge(D2, "unix:/decode-2", warm=True)]
    assert one.handle(EdgeUp(D2, False), 0.3) == []
    assert one.next_deadline() is None
    actions = one.handle(prefill(list(range(10)), decode=D1), 1.0)
    assert not dials(actions)
    assert to_peer(actions, KvOpen)  # in the same breath: its edge is up


def test_without_the_setting_nobody_is_dialled() -> None:
    one = warm_core(warm_edges=0)
    assert one.handle(partners(D1, D2), 0.0) == []
    assert one.quiet()


def test_nothing_is_dialled_beforehand_while_something_is_to_be_computed() -> None:
    one = warm_core()
    actions = one.handle(prefill(list(range(4))), 0.0)
    one.handle(EdgeUp(D, True), 0.0)
    assert dials(one.handle(partners(D1), 0.1)) == []
    plan = plan_of(actions)
    assert plan is not None
    assert one.next_deadline() is None or one.next_deadline() != 0.1
    assert dials(one.handle(step_done(plan, token=5), 0.2)) == []  # not committed yet
    ended = one.handle(RouterLost(ROUTER), 0.3)  # takes its partners along
    assert dials(ended) == []
    assert dials(one.handle(partners(D1), 0.4)) == [OpenEdge(D1, "unix:/decode-1", warm=True)]


def test_an_attempt_waits_for_a_dial_under_way_and_is_opened_when_it_is_up() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    assert dials(one.handle(prefill(list(range(4)), decode=D1), 0.1)) == []
    assert to_peer(one.handle(EdgeUp(D1, True), 0.2), KvOpen)


def test_an_attempt_for_another_worker_does_not_wait_for_it() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    assert only(one.handle(prefill(list(range(4)), decode=D2), 0.1), OpenEdge).warm is False
    assert to_peer(one.handle(EdgeUp(D2, True), 0.2), KvOpen)


def test_a_dial_that_fails_is_repeated_for_an_attempt_that_waits_for_it() -> None:
    """It was refused because nobody needed it: now somebody does, and fails only if this one fails."""
    one = warm_core()
    one.handle(partners(D1), 0.0)
    one.handle(prefill(list(range(4)), decode=D1), 0.1)
    actions = one.handle(EdgeDown(D1, "it is busy"), 0.2)
    assert only(actions, OpenEdge) == OpenEdge(D1, "unix:/decode-1", timeout_s=9.9)
    assert not to_router(actions, AttemptFailed)
    assert to_router(one.handle(EdgeDown(D1, "refused"), 0.3), AttemptFailed)[0].code == "edge_lost"


def test_an_attempt_has_one_deadline_for_the_dial_it_waits_for_and_its_own() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    one.handle(prefill(list(range(4)), decode=D1), 4.0)  # waits until 14.0, whatever comes
    again = only(one.handle(EdgeDown(D1, "the edge did not come up in time"), 10.0), OpenEdge)
    assert (again.warm, again.timeout_s) == (False, 4.0)
    assert to_router(one.handle(EdgeDown(D1, "the edge did not come up in time"), 14.0), AttemptFailed)


def test_no_dial_begins_for_an_attempt_whose_time_is_up() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    one.handle(prefill(list(range(4)), decode=D1), 0.0)
    actions = one.handle(EdgeDown(D1, "the edge did not come up in time"), 10.0)
    assert dials(actions) == []
    assert to_router(actions, AttemptFailed)[0].code == "edge_lost"


def test_what_does_not_come_up_is_tried_again_after_growing_delays() -> None:
    one, now, delays = warm_core(), 0.0, []
    one.handle(partners(D1), now)
    for _ in range(1100):  # a day of it: no number grows out of bounds
        assert dials(one.handle(EdgeDown(D1, "it is busy"), now)) == []
        due = one.next_deadline()
        assert due is not None
        assert dials(one.handle(Tick(), (now + due) / 2)) == []
        delays.append(due - now)
        now = due
        assert dials(one.handle(Tick(), now)) == [OpenEdge(D1, "unix:/decode-1", warm=True)]
    assert delays == [RETRY_S * 2 ** min(count, MAX_DOUBLINGS) for count in range(1100)]


def test_one_that_does_not_come_up_keeps_no_other_waiting() -> None:
    one = warm_core()
    one.handle(partners(D1, D2), 0.0)
    assert dials(one.handle(EdgeDown(D1, "no answer"), 10.0)) == [OpenEdge(D2, "unix:/decode-2", warm=True)]


def test_an_edge_that_broke_is_made_again_beforehand() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    one.handle(EdgeUp(D1, False), 0.1)
    one.handle(EdgeDown(D1, "the watchdog"), 5.0)
    assert dials(one.handle(Tick(), 5.0 + RETRY_S)) == [OpenEdge(D1, "unix:/decode-1", warm=True)]


def test_an_edge_that_came_up_is_made_again_as_soon_as_the_first_time() -> None:
    one, now = warm_core(), 0.0
    one.handle(partners(D1), now)
    for _ in range(5):
        one.handle(EdgeDown(D1, "it is busy"), now)
        due = one.next_deadline()
        assert due is not None
        now = due
        one.handle(Tick(), now)
    one.handle(EdgeUp(D1, False), now)
    one.handle(EdgeDown(D1, "the watchdog"), now + 100.0)
    assert one.next_deadline() == now + 100.0 + RETRY_S


def test_who_is_gone_is_dialled_no_more_and_a_successor_is() -> None:
    one = warm_core()
    one.handle(partners(D1), 0.0)
    one.handle(EdgeDown(D1, "gone"), 0.1)
    assert one.handle(partners(), 0.2) == []
    assert one.next_deadline() is None
    successor = Peer(D1.worker, Epoch(2))
    assert only(one.handle(partners(successor), 0.3), OpenEdge).peer == successor


def test_routers_that_know_different_workers_are_both_believed() -> None:
    """One has not heard yet of the successor: of a worker's epochs the latest lives."""
    one, successor = warm_core(), Peer(D1.worker, Epoch(2))
    one.handle(partners(successor), 0.0)
    one.handle(EdgeUp(successor, False), 0.1)
    assert only(one.handle(partners(D1, D2, router=OTHER_ROUTER), 0.2), OpenEdge).peer == D2
    one.handle(EdgeUp(D2, False), 0.3)
    one.handle(RouterLost(OTHER_ROUTER), 0.4)
    one.handle(EdgeDown(D2, "broke"), 0.5)
    assert one.next_deadline() is None  # nobody speaks of it any more


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_worker_that_leaves_dials_nobody(comes_first: bool) -> None:
    one = warm_core()
    events = [FromRouter(ROUTER, Drain(grace_s=5.0)), partners(D1, D2)]
    actions = [dials(one.handle(event, 0.0)) for event in (events if comes_first else events[::-1])]
    assert len([dial for some in actions for dial in some]) == (0 if comes_first else 1)
    assert dials(one.handle(EdgeUp(D1, False), 0.1) if not comes_first else []) == []
