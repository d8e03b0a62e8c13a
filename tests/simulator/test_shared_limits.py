"""Limits that routers share through Redis, in virtual time: with it, without it, and the checks on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.process import Process
from bench.simulator.scenario import Scenario, draw
from bench.simulator.shared_limits import DEADLINE_S, Redis, SharedLimits
from bench.simulator.simulation import Simulation
from bench.simulator.violation import Violation
from cluster.ids import RouterId
from router.quotas.book import Hold, Wait
from router.quotas.limits import Demand, KeyLimits

LIMITS = KeyLimits(tokens_per_min=200, concurrent=3)


class Router(Process):
    """One without requests of its own."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation.site.queue, simulation.site.rng, name, simulation.site.routers[0].epoch)

    def next_deadline(self) -> None:
        return None


def scenario(seed: int, *, faults: bool) -> Scenario:
    return replace(draw(seed, num_requests=60, faults=faults), num_routers=2, limits=LIMITS)


def world() -> tuple[Simulation, Redis, Router, SharedLimits]:
    """Two routers of which one is the test's; nothing else happens."""
    simulation = Simulation(replace(draw(0, num_requests=1, faults=False), num_routers=1))
    redis, router = Redis(simulation.site.queue), Router(simulation, "router-x")
    return simulation, redis, router, SharedLimits(redis, router, RouterId("router-x"))


@pytest.mark.parametrize("seed", range(2, 5))  # in which some exceed a limit
def test_several_routers_serve_all_within_shared_limits(seed: int) -> None:
    simulation = Simulation(scenario(seed, faults=False))
    report = simulation.run()
    assert report.violation is None
    assert sum(report.outcomes.values()) == 60
    assert report.counters.get("rate limited", 0) > 0
    redis = simulation.site.redis
    assert redis is not None
    assert sum(redis.spent.values()) > 600
    assert all(held == {} for held in redis.memory.slots.values())


@pytest.mark.parametrize("seed", range(4))
def test_redis_gone_stops_nobody(seed: int) -> None:
    simulation = Simulation(replace(scenario(seed, faults=True), fault_every=150))
    only = simulation.injector.kinds["Redis gone"]
    simulation.injector.kinds.clear()
    simulation.injector.kinds["Redis gone"] = only
    report = simulation.run()
    assert report.violation is None
    assert report.faults["Redis gone"] > 0
    assert sum(report.touched["Redis gone"].values()) > 0
    assert report.outcomes["exact"] + report.outcomes["stop string"] + report.outcomes["deadline"] == 60


def test_redis_is_a_fault_only_where_routers_share_one() -> None:
    assert "Redis gone" not in Simulation(replace(scenario(0, faults=True), num_routers=1)).injector.kinds
    assert "Redis gone" in Simulation(scenario(0, faults=True)).injector.kinds


def test_a_request_waits_for_its_lease_and_no_longer_than_the_deadline() -> None:
    simulation, redis, router, limits = world()
    queue = simulation.site.queue
    ends: list[tuple[float, Hold | Wait]] = []
    limits.take("t", LIMITS, Demand(10, 10), lambda verdict: ends.append((queue.now, verdict)))
    queue.run(0.01)
    redis.go_away()
    limits.take("other", LIMITS, Demand(10, 10), lambda verdict: ends.append((queue.now, verdict)))
    queue.run(1.0)
    (granted_at, first), (alone_at, second) = ends
    assert isinstance(first, Hold)
    assert isinstance(second, Hold)
    assert 0.0 < granted_at < 0.01
    assert alone_at == pytest.approx(0.01 + DEADLINE_S)
    is_lost = limits.book.is_lost
    assert is_lost
    redis.come_back(empty=True)
    queue.run(3.0)
    assert not limits.book.is_lost
    for hold in (first, second):
        limits.settle(hold, 15)
    assert not limits.quiet()
    queue.run(8.0)
    assert limits.quiet()
    assert router.is_alive


def test_more_than_a_tenant_may_use_is_seen() -> None:
    _, redis, _, _ = world()
    redis.spent["t"] = 210
    redis.check_bound(LIMITS)
    redis.spent["t"] = 211  # a minute's, and a slice of 5 %
    with pytest.raises(Violation) as caught:
        redis.check_bound(LIMITS)
    assert caught.value.rule == "limits"


def test_more_requests_at_once_than_a_tenant_may_have_are_seen() -> None:
    simulation, redis, _, limits = world()
    other = SharedLimits(redis, Router(simulation, "router-y"), RouterId("router-y"))
    for book in (limits.book, limits.book, other.book):
        book.take("t", KeyLimits(concurrent=9), Demand(1, 1), 0.0)
        book._sharers["t"].tenant.hold("t", 0.0, 0.0)
    redis.check_places("t", LIMITS)
    other.book._sharers["t"].tenant.hold("t", 0.0, 0.0)
    with pytest.raises(Violation) as caught:
        redis.check_places("t", LIMITS)
    assert caught.value.rule == "limits"
    redis.go_away()
    redis.check_places("t", LIMITS)
