"""Tenants take turns by the work they get: nobody's flood costs another more than its share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from router.admission import AdmissionQueue
from router.config import ConductorConfig
from router.fair_lines import Claimant, FairLines, Turn
from tests.router.conductor_peers import World, make_spec


def join(lines: FairLines, name: str, order: int, tenant: str, work: float = 1.0, share: float = 1.0) -> None:
    lines.join(Claimant(RequestId(name), order, Turn(tenant, share, work), float(order)))


def serve(lines: FairLines) -> str:
    """The one whose turn it is."""
    (request,) = lines.in_turn(1)
    first = lines.first()
    assert first is not None
    assert first.request == request
    lines.served(first.turn)
    lines.leave(request)
    return request


def test_a_flood_waits_behind_one_of_another() -> None:
    lines = FairLines()
    for i in range(100):
        join(lines, f"a{i}", i, "a")
    join(lines, "b0", 100, "b")
    assert lines.in_turn(4) == ["a0", "b0", "a1", "a2"]
    assert lines.num_before("b") == 3  # its own, and two of a's
    assert lines.num_before("c") == 2
    assert lines.num_before("a") == 101
    assert [serve(lines) for _ in range(3)] == ["a0", "b0", "a1"]


def test_work_counts_and_not_requests() -> None:
    lines = FairLines()
    for i in range(4):
        join(lines, f"large{i}", i, "large", work=90.0)
    for i in range(20):
        join(lines, f"small{i}", 10 + i, "small", work=10.0)
    turns = [serve(lines) for _ in range(13)]
    assert [turn for turn in turns if turn.startswith("large")] == ["large0", "large1"]


def test_shares() -> None:
    lines = FairLines()
    for i in range(60):
        join(lines, f"x{i}", i, "x", share=1.0)
        join(lines, f"y{i}", 100 + i, "y", share=3.0)
    served = [serve(lines)[0] for _ in range(40)]
    assert served.count("y") in (29, 30, 31)


def test_one_tenant_alone_is_served_in_order_and_leaving_costs_nothing() -> None:
    lines = FairLines()
    for order in (3, 1, 2):
        join(lines, f"r{order}", order, "a")
    assert lines.in_turn(2) == ["r1", "r2"]
    join(lines, "b0", 9, "b")
    for order in (1, 2):
        lines.leave(RequestId(f"r{order}"))
    lines.leave(RequestId("r1"))
    assert [serve(lines), serve(lines)] == ["r3", "b0"]
    assert lines.first() is None
    assert lines.in_turn(5) == []
    assert (lines._finish, lines._lines, lines._virtual) == ({}, {}, 0.0)


def test_who_gives_its_place_up() -> None:
    lines = FairLines()
    for i in range(5):
        join(lines, f"a{i}", i, "a")
    join(lines, "again", 5, "a", work=0.0)  # had its turn: it keeps its place
    assert lines.overlong("b", 1.0) == "a4"
    assert lines.overlong("a", 1.0) is None
    for i in range(4):
        join(lines, f"b{i}", 10 + i, "b")
    assert lines.overlong("b", 1.0) == "a4"
    join(lines, "b4", 14, "b")
    assert lines.overlong("b", 1.0) is None
    assert lines.overlong("b", 2.0) == "a4"


@given(
    shares=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    works=st.lists(st.integers(1, 50), min_size=4, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_while_two_wait_their_work_differs_by_one_request_of_each(
    shares: list[int], works: list[int], seed: int
) -> None:
    """|W_i / s_i - W_j / s_j| <= max work_i / s_i + max work_j / s_j over any interval in which both wait,
    with newcomers that come at any time and others that give up."""
    rng, lines = random.Random(seed), FairLines()
    order = 0
    waiting: dict[int, int] = dict.fromkeys(range(len(shares)), 0)
    got: dict[int, list[float]] = {tenant: [] for tenant in waiting}
    backlogged_since = dict.fromkeys(waiting, 0)
    for step in range(120):
        for tenant, share in enumerate(shares):
            while rng.random() < (0.7 if waiting[tenant] < 3 else 0.1):
                order += 1
                if waiting[tenant] == 0:
                    backlogged_since[tenant] = step
                join(lines, f"{tenant}/{order}", order, str(tenant), float(rng.choice(works)), float(share))
                waiting[tenant] += 1
        if not len(lines):
            for tenant in got:
                got[tenant].append(0.0)
            continue
        first = lines.first()
        assert first is not None
        served = int(serve(lines).split("/")[0])
        waiting[served] -= 1
        for tenant in got:
            got[tenant].append(first.turn.work / shares[tenant] if tenant == served else 0.0)
        if waiting[served] == 0:
            backlogged_since[served] = step + 1
        most = max(works)
        for i in got:
            for j in got:
                start = max(backlogged_since[i], backlogged_since[j])
                if i < j and waiting[i] and waiting[j]:
                    difference = sum(got[i][start:]) - sum(got[j][start:])
                    assert abs(difference) <= most / shares[i] + most / shares[j] + 1e-9


@given(seed=st.integers(0, 2**16))
def test_in_turn_is_what_serving_one_by_one_gives_and_nobody_starves(seed: int) -> None:
    rng, lines = random.Random(seed), FairLines()
    shares = {tenant: rng.randint(1, 3) for tenant in "abc"}
    for order in range(rng.randint(1, 40)):
        tenant = rng.choice("aaab c".replace(" ", ""))
        join(lines, f"r{order}", order, tenant, float(rng.randint(0, 9)), float(shares[tenant]))
    expected = lines.in_turn(100)
    assert len(expected) == len(lines)
    assert [serve(lines) for _ in expected] == expected


# ---- the queue


def test_waits_are_those_of_the_tenant() -> None:
    queue = AdmissionQueue(max_queued=100, max_overtake_s=5.0)
    for i in range(50):
        queue.add(RequestId(f"a{i}"), i, 0.0, Turn("a"))
    for i in range(10):
        queue.departed(1.0 + i)
    assert queue.expected_wait_s(10.0, "a") == 51.0
    assert queue.expected_wait_s(10.0, "b") == 2.0
    assert queue.retry_after_s(10.0, "a") == 46.0
    assert queue.retry_after_s(10.0, "b") == 2.0


# ---- the conductor


def of(tenant: str, name: str, **sizes: int) -> RequestSpec:
    spec = make_spec(name, **sizes)
    return RequestSpec(request=spec.request, token_ids=spec.token_ids, sampling=spec.sampling, tenant=tenant)


def full_world(num_queued: int, max_queued: int = 1024) -> World:
    """One slot; `a` holds it and has the queue."""
    world = World(ConductorConfig(max_queued=max_queued))
    world.decode("d0", max_num_seqs=1)
    for i in range(num_queued + 1):
        world.submit(of("a", f"a{i}"))
    assert world.conductor.num_queued == num_queued
    return world


def placed(world: World) -> list[str]:
    return [life.request for life in world.lifecycle if life.event is LifecycleEvent.PLACED]


def test_a_flood_does_not_delay_another_tenant_beyond_its_share() -> None:
    world = full_world(200)
    others = [world.submit(of("b", f"b{i}")) for i in range(5)]
    while not all(client.has_ended for client in others):
        world.work(WorkerId("d0"))
        world.heartbeat("d0")
        world.advance(0.01)
    assert [name[0] for name in placed(world)][:11] == list("a" + "ab" * 5)
    for client in others:
        world.assert_served(client)


def test_a_full_queue_has_room_for_one_whose_line_is_short() -> None:
    world = full_world(10, max_queued=10)
    last, newest = world.clients["a10"], world.submit(of("a", "a11"))
    assert newest.error is not None
    first = world.submit(of("b", "b0"))
    assert first.error is None
    assert "queue is full" in str(last.error)
    assert world.conductor.num_queued == 10
    for i in range(1, 9):
        world.submit(of("b", f"b{i}"))
    refused = {name for name, client in world.clients.items() if client.error is not None}
    assert refused == {"a11", *(f"a{i}" for i in range(6, 11)), *(f"b{i}" for i in range(5, 9))}


def test_one_that_lost_its_worker_goes_first_in_its_line_and_is_not_charged_again() -> None:
    world = full_world(3)
    world.submit(of("b", "b0"))
    world.kill("d0")
    world.decode("d1", max_num_seqs=1)
    world.run()
    assert placed(world)[:4] == ["a0", "a0", "a1", "b0"]
    for client in world.clients.values():
        world.assert_served(client)


def test_priority_orders_within_a_tenant_only() -> None:
    lines = FairLines()
    join(lines, "a0", (0 << 48) + 1, "a")
    lines.join(Claimant(RequestId("b0"), (-5 << 48) + 2, Turn("b"), 2.0))
    lines.join(Claimant(RequestId("b1"), (-9 << 48) + 3, Turn("b"), 3.0))
    assert lines.in_turn(3) == ["a0", "b1", "b0"]


@pytest.mark.parametrize("num_tenants", [1, 200])
def test_turns_of_many_tenants(num_tenants: int) -> None:
    lines = FairLines()
    for i in range(1000):
        join(lines, f"r{i}", i, str(i % num_tenants))
    assert lines.in_turn(64) == [f"r{i}" for i in range(64)]
