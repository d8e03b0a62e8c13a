"""Slices of shared limits: nothing is made or lost, the bound holds, no state keeps a router from serving."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st

from cluster.clock import ManualClock
from cluster.ids import RouterId
from cluster.shared_state import Memory, MemoryState, SharedStateLost
from router.quotas.book import Hold, Wait
from router.quotas.limits import Demand, KeyLimits, Limit
from router.quotas.slices import IDLE_S, SLICE, Short, SliceBook

T = TypeVar("T")


def now_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a call that never waits returns."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


class Router:
    """As `Sharing`, without a loop. `away`: its leases fail; `deaf`: they arrive and their answers do not."""

    def __init__(self, memory: Memory, name: str) -> None:
        self.book = SliceBook()
        self.state = MemoryState(memory, RouterId(name), ttl_s=10.0)
        self.clock = memory.clock
        self.away = self.deaf = False
        self.num_leases = 0

    def take(self, limits: KeyLimits, prompt: int, output: int = 0, name: str = "t") -> Hold | Wait:
        demand = Demand(prompt, output)
        verdict = self.book.take(name, limits, demand, self.clock.now())
        if isinstance(verdict, Short):
            self.lease(name, demand)
            verdict = self.book.take(name, limits, demand, self.clock.now())
        if isinstance(verdict, Short):
            return self.book.refused(name, demand, self.clock.now())
        return verdict

    def settle(self, hold: Hold, used: int, *, counts: bool = True) -> None:
        self.book.settle(hold, used, self.clock.now(), counts=counts)

    def lease(self, name: str, demand: Demand | None) -> None:
        self.num_leases += 1
        ask = self.book.ask(name, demand, self.clock.now())
        try:
            if self.away:
                raise SharedStateLost("away")
            grant = now_of(self.state.lease(ask))
            if self.deaf:
                raise SharedStateLost("deaf")
        except SharedStateLost:
            self.book.unanswered(ask)
            self.book.lost(self.clock.now())
        else:
            self.book.granted(ask, grant, self.clock.now())

    def sync(self) -> None:
        if self.book.is_lost:
            if self.away or self.deaf:
                return
            self.book.found(now_of(self.state.check()))
        for name in self.book.due():
            if not self.book.is_lost:
                self.lease(name, None)

    def at_hand(self, limit: Limit = Limit.TOKENS) -> float:
        """And on its way back."""
        sharer = self.book._sharers.get("t")
        if sharer is None or limit not in sharer.slices:
            return 0.0
        return sharer.slices[limit].at_hand + sharer.slices[limit].back


def world(num_routers: int) -> tuple[Memory, list[Router]]:
    memory = Memory(ManualClock(100.0))
    return memory, [Router(memory, f"r{i}") for i in range(num_routers)]


def advance(memory: Memory, seconds: float) -> None:
    assert isinstance(memory.clock, ManualClock)
    memory.clock.advance(seconds)


LIMITS = KeyLimits(requests_per_min=100, tokens_per_min=6000, concurrent=6)


# ---- the ordinary way


def test_most_requests_ask_nobody() -> None:
    _, (a,) = world(1)
    limits = KeyLimits(tokens_per_min=6000)
    for _ in range(300):
        assert isinstance(a.take(limits, 20), Hold)
    assert a.num_leases <= 1 + 1 / SLICE
    refused = a.take(limits, 20)
    assert isinstance(refused, Wait)
    assert refused == Wait(Limit.TOKENS, pytest.approx(0.2))
    num = a.num_leases
    for _ in range(50):  # for a moment nobody asks again
        assert isinstance(a.take(limits, 20), Wait)
    assert a.num_leases == num


def test_two_routers_share_all_limits() -> None:
    memory, (a, b) = world(2)
    few = KeyLimits(requests_per_min=3)
    holds = [a.take(few, 0), b.take(few, 0), b.take(few, 0)]
    assert all(isinstance(hold, Hold) for hold in holds)
    assert a.take(few, 0) == Wait(Limit.REQUESTS, pytest.approx(20.0))
    assert a.book.look("t", few, 100.0) == Wait(Limit.REQUESTS, pytest.approx(20.0))
    advance(memory, 20.0)
    assert isinstance(a.take(few, 0), Hold)
    assert isinstance(b.take(few, 0), Wait)


def test_places_are_shared_and_come_back() -> None:
    memory, (a, b) = world(2)
    limits = KeyLimits(concurrent=3)
    holds = [a.take(limits, 1), a.take(limits, 1), b.take(limits, 1)]
    assert all(isinstance(hold, Hold) for hold in holds)
    refused = [a.take(limits, 1), b.take(limits, 1)]
    assert [wait.limit for wait in refused if isinstance(wait, Wait)] == [Limit.CONCURRENT] * 2
    assert isinstance(holds[0], Hold)
    a.settle(holds[0], 1)
    a.sync()
    advance(memory, 0.2)
    assert isinstance(b.take(limits, 1), Hold)
    assert isinstance(a.take(limits, 1), Wait)


def test_a_prompt_longer_than_a_minute_never_fits() -> None:
    _, (a,) = world(1)
    assert a.take(LIMITS, 6001) == Wait(Limit.TOKENS, None)
    assert a.num_leases == 0


def test_an_idle_tenant_brings_everything_back() -> None:
    memory, (a, b) = world(2)
    hold = a.take(LIMITS, 100, 100)
    assert isinstance(hold, Hold)
    a.settle(hold, 150)
    assert a.at_hand() > 0
    advance(memory, IDLE_S + 0.1)
    a.sync()
    assert a.book.due() == []
    assert memory.slots["t"] == {}
    assert isinstance(b.take(LIMITS, 5800), Hold)


def test_standing_tells_what_is_left_for_this_router() -> None:
    _, (a,) = world(1)
    hold = a.take(LIMITS, 1000, 1000)
    assert isinstance(hold, Hold)
    told = a.book.standing("t", LIMITS, 100.0)
    assert (told[Limit.TOKENS].remaining, told[Limit.TOKENS].reset_s) == (4000, 20.0)
    assert told[Limit.REQUESTS].remaining == 99
    assert a.book.standing("other", LIMITS, 100.0)[Limit.TOKENS].remaining == 6000


# ---- the state is away


def test_without_the_state_each_router_has_its_part() -> None:
    memory, (a, b) = world(2)
    limits = KeyLimits(tokens_per_min=6000, concurrent=4)
    for router in (a, b):
        now_of(router.state.check())
        hold = router.take(limits, 100)
        assert isinstance(hold, Hold)
        router.settle(hold, 100)
    for router in (a, b):
        router.sync()
        router.away = True
    advance(memory, 1.0)
    for router in (a, b):
        router.sync()
        assert router.book.is_lost
        num = router.num_leases
        admitted = 0
        while isinstance(hold := router.take(limits, 100), Hold):
            router.settle(hold, 100)
            admitted += 100
        assert 2700 <= admitted <= 3000
        assert router.num_leases == num  # nobody is asked
        holds = [router.take(limits, 0) for _ in range(3)]
        assert [isinstance(hold, Hold) for hold in holds] == [True, True, False]
        for hold in holds[:2]:
            assert isinstance(hold, Hold)
            router.settle(hold, 0)
    for router in (a, b):
        router.away = False
        router.sync()
        assert not router.book.is_lost
    assert isinstance(a.take(limits, 1000), Wait)  # what was used meanwhile is known again
    advance(memory, 60.0)
    assert isinstance(a.take(limits, 1000), Hold)


def test_a_request_that_was_admitted_with_the_state_ends_without_it() -> None:
    memory, (a,) = world(1)
    hold = a.take(LIMITS, 100, 1900)
    assert isinstance(hold, Hold)
    a.away = True
    a.sync()
    a.settle(hold, 150)
    assert a.book.quiet()
    a.away = False
    a.sync()
    a.sync()
    meter = memory.meters["t", "tokens"]
    assert meter.used == pytest.approx(150 + a.at_hand())


# ---- properties


@hypothesis.given(seed=st.integers(0, 2**20), breaks=st.booleans())
@hypothesis.settings(max_examples=80)
def test_nothing_is_made_and_nothing_is_lost(seed: int, breaks: bool) -> None:
    """While time stands still: what the state thinks used is what requests have used or hold, and what
    routers have at hand. Where leases or their answers get lost it is never less."""
    rng = random.Random(seed)
    memory, routers = world(rng.randint(1, 3))
    holds: list[tuple[Router, Hold]] = []
    used = {Limit.TOKENS: 0.0, Limit.REQUESTS: 0.0}
    for _ in range(rng.randint(1, 60)):
        router = rng.choice(routers)
        action = rng.random()
        if action < 0.5:
            verdict = router.take(LIMITS, rng.randint(0, 1500), rng.randint(0, 1500))
            if isinstance(verdict, Hold):
                holds.append((router, verdict))
        elif action < 0.8 and holds:
            owner, hold = holds.pop(rng.randrange(len(holds)))
            counts = rng.random() < 0.8
            tokens = rng.randint(0, int(hold.num_tokens) + 50) if counts else 0
            owner.settle(hold, tokens, counts=counts)
            used[Limit.TOKENS] += tokens
            used[Limit.REQUESTS] += counts
        elif action < 0.9 or not breaks:
            router.sync()
        else:
            router.away, router.deaf = rng.choice([(False, False), (True, False), (False, True)])
        for own in routers:
            assert own.book.num_held("t") == sum(owner is own for owner, _ in holds)
        if not breaks:
            assert len(holds) <= 6
    for owner, hold in holds:
        owner.settle(hold, 10)
        used[Limit.TOKENS] += 10
        used[Limit.REQUESTS] += 1
    for router in routers:
        assert router.book.quiet()
        router.away = router.deaf = False
        router.sync()
    for limit, total in used.items():
        meter = memory.meters.get(("t", limit.value))
        by_all = 0.0 if meter is None else meter.used
        accounted = total + sum(router.at_hand(limit) for router in routers)
        assert by_all >= accounted - 1e-6
        if not breaks:
            assert by_all == pytest.approx(accounted, abs=1e-6)


@hypothesis.given(seed=st.integers(0, 2**20))
@hypothesis.settings(max_examples=50)
def test_the_bound_over_any_time(seed: int) -> None:
    """N routers admit at most per_min * (1 + t / 60 + SLICE * N) over any t seconds."""
    rng = random.Random(seed)
    memory, routers = world(rng.randint(1, 4))
    limits = KeyLimits(tokens_per_min=1000)
    admitted: list[tuple[float, int]] = []
    for _ in range(120):
        cost = rng.choice([1, 5, 30, 200])
        router = rng.choice(routers)
        verdict = router.take(limits, cost)
        if isinstance(verdict, Hold):
            router.settle(verdict, cost)
            admitted.append((memory.clock.now(), cost))
        elif rng.random() < 0.3:
            advance(memory, rng.choice([0.01, 0.5, 3.0]))
            for other in routers:
                if rng.random() < 0.5:
                    other.sync()
        if rng.random() < 0.02:
            advance(memory, 60.0)
        for other in routers:
            assert other.at_hand() <= SLICE * 1000 + 1e-6
    for begin, (start, _) in enumerate(admitted):
        total = 0
        for at, cost in admitted[begin:]:
            total += cost
            assert total <= 1000 * (1 + (at - start) / 60 + SLICE * len(routers)) + 1e-3


@hypothesis.given(seed=st.integers(0, 2**20))
@hypothesis.settings(max_examples=30)
def test_a_wait_is_long_enough_when_nobody_else_takes(seed: int) -> None:
    rng = random.Random(seed)
    memory, (a, b) = world(2)
    limits = KeyLimits(requests_per_min=20, tokens_per_min=1000)
    for _ in range(60):
        a_or_b = rng.choice([a, b])
        cost = rng.choice([10, 100, 400])
        verdict = a_or_b.take(limits, cost)
        if isinstance(verdict, Hold):
            a_or_b.settle(verdict, cost)
            continue
        assert verdict.retry_after_s is not None
        for router in (a, b):  # nobody keeps what it does not use
            advance(memory, IDLE_S + 0.1)
            router.sync()
        advance(memory, verdict.retry_after_s)
        again = a_or_b.take(limits, cost)
        assert isinstance(again, Hold)
        a_or_b.settle(again, cost)


def test_places_that_are_brought_back_are_not_taken_while_the_lease_is_under_way() -> None:
    """The answer takes its time, and another router has them already."""
    clock = ManualClock()
    memory = Memory(clock)
    one, other = Router(memory, "a"), Router(memory, "b")
    limits, small = KeyLimits(concurrent=4), Demand(1, 0)
    holds = [one.take(limits, 1) for _ in range(4)]
    for hold in holds[1:]:
        assert isinstance(hold, Hold)
        one.settle(hold, 1)
    ask = one.book.ask("t", None, clock.now())
    grant = now_of(one.state.lease(ask))
    clock.advance(0.2)
    taken = [other.take(limits, 1) for _ in range(4)]
    assert sum(isinstance(verdict, Hold) for verdict in taken) == 3
    assert isinstance(one.book.take("t", limits, small, clock.now()), Short)
    one.book.granted(ask, grant, clock.now())
    assert one.book.num_held("t") + other.book.num_held("t") == 4
