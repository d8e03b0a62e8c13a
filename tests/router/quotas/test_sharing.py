"""A router in touch with the shared state, whatever becomes of that: requests go on, in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from cluster.clock import Clock, ManualClock, MonotonicClock
from cluster.ids import RouterId
from cluster.metrics import Metrics
from cluster.shared_state import LeaseAsk, LeaseGrant, Memory, MemoryState, SharedState, SharedStateLost
from router.quotas.book import Hold, Wait
from router.quotas.limits import Demand, KeyLimits, Limit
from router.quotas.sharing import Sharing
from router.quotas.slices import SLICE
from tests.support.redis_world import RedisWorld, redis_world

LIMITS = KeyLimits(requests_per_min=1000, tokens_per_min=6000, concurrent=50)
BACK, AWAY = "quotas are shared again", "until the shared state is back"


class Fickle:
    """A shared state that can be made to fail, or to take its time."""

    def __init__(self, inner: SharedState) -> None:
        self.inner = inner
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.asks: list[LeaseAsk] = []

    async def lease(self, ask: LeaseAsk) -> LeaseGrant:
        self.asks.append(ask)
        await self.gate.wait()
        if self.is_away:
            raise SharedStateLost("it is away")
        return await self.inner.lease(ask)

    async def check(self) -> int:
        if self.is_away:
            raise SharedStateLost("it is away")
        return await self.inner.check()

    async def close(self) -> None:
        await self.inner.close()


def make(state: SharedState, clock: Clock) -> Sharing:
    return Sharing(state, clock, Metrics(CollectorRegistry(), version="test", model="m"))


def is_up(sharing: Sharing) -> tuple[float, float]:
    """(the gauge, how often it went away)."""
    metrics = sharing._metrics
    return metrics._shared_up._value.get(), metrics._shared_losses._value.get()


async def admitted(sharing: Sharing, tokens: int = 10, name: str = "t") -> Hold:
    hold = await sharing.take(name, LIMITS, Demand(tokens, 0))
    assert isinstance(hold, Hold), hold
    return hold


@pytest.fixture
def fickle() -> Fickle:
    return Fickle(MemoryState(Memory(ManualClock()), RouterId("a"), 10.0))


async def test_requests_that_find_too_little_wait_for_one_lease_after_the_other(fickle: Fickle) -> None:
    sharing = make(fickle, ManualClock())
    fickle.gate.clear()
    tasks = [asyncio.create_task(admitted(sharing)) for _ in range(20)]
    other = asyncio.create_task(admitted(sharing, name="other"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(fickle.asks) == 2  # one for each tenant
    fickle.gate.set()
    holds = await asyncio.gather(*tasks, other)
    assert len(fickle.asks) < 20
    for hold in holds:
        sharing.book.settle(hold, 10, 0.0)
    assert sharing.book.quiet()


async def test_lost_and_found_are_told_once(fickle: Fickle, caplog: pytest.LogCaptureFixture) -> None:
    sharing = make(fickle, ManualClock())
    await admitted(sharing)
    assert is_up(sharing) == (1.0, 0.0)
    fickle.is_away = True
    num = len(fickle.asks)
    for tenant in range(5):
        await admitted(sharing, 2000, name=f"t{tenant}")
        await sharing.sync()
    assert len(fickle.asks) == num + 1
    assert is_up(sharing) == (0.0, 1.0)
    assert caplog.text.count(AWAY) == 1
    fickle.is_away = False
    await sharing.sync()
    assert is_up(sharing) == (1.0, 1.0)
    assert caplog.text.count(BACK) == 1
    refused = await sharing.take("t0", LIMITS, Demand(5000, 0))
    assert isinstance(refused, Wait)
    assert refused.limit is Limit.TOKENS


async def test_a_request_that_is_given_up_while_it_waits_takes_nothing(fickle: Fickle) -> None:
    sharing = make(fickle, ManualClock())
    fickle.is_away = True
    sharing.book.settle(await admitted(sharing, 500), 500, 0.0)
    fickle.is_away = False
    await fickle.check()
    sharing.book.found(1)
    fickle.gate.clear()
    waiting = asyncio.create_task(admitted(sharing, 100))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    fickle.gate.set()
    assert sharing.book.quiet()
    await sharing.sync()  # what was used while the state was away is told with the next lease
    memory = fickle.inner._memory  # type: ignore[attr-defined]
    assert memory.meters["t", "tokens"].used == 500.0 + 300.0  # and a slice


async def test_a_router_without_requests_is_counted(fickle: Fickle) -> None:
    sharing = make(fickle, ManualClock())
    other = MemoryState(fickle.inner._memory, RouterId("b"), 10.0)  # type: ignore[attr-defined]
    await sharing.sync()
    assert await other.check() == 2
    await sharing.sync()
    fickle.is_away = True
    await sharing.sync()
    assert is_up(sharing) == (0.0, 1.0)
    limits = KeyLimits(requests_per_min=10)
    verdicts = [await sharing.take("t", limits, Demand(0, 0)) for _ in range(6)]
    assert [isinstance(verdict, Hold) for verdict in verdicts] == [True] * 5 + [False]  # its half


async def test_a_stop_brings_everything_back(fickle: Fickle) -> None:
    sharing = make(fickle, ManualClock())
    hold = await admitted(sharing)
    sharing.book.settle(hold, 10, 0.0)
    await sharing.close()
    memory = fickle.inner._memory  # type: ignore[attr-defined]
    assert memory.meters["t", "tokens"].used == 10.0
    assert memory.slots["t"] == {}
    assert memory.routers == {}


async def test_what_belongs_to_tenants_that_left_is_forgotten(fickle: Fickle) -> None:
    clock = ManualClock()
    sharing = make(fickle, clock)
    for tenant in range(30):
        hold = await admitted(sharing, name=f"t{tenant}")
        sharing.book.settle(hold, 10, clock.now())
    clock.advance(3.0)
    await sharing.sync()
    assert (sharing.book.due(), sharing._locks) == ([], {})


# ---- with Redis


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisWorld]:
    with redis_world() as world:
        yield world


class Routers:
    """Routers on one Redis; their background tasks run."""

    def __init__(self, world: RedisWorld) -> None:
        self.world = world
        self.all: list[Sharing] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, deadline_s: float) -> Sharing:
        state = self.world.state(f"r{len(self.all)}", deadline_s=deadline_s)
        sharing = make(state, MonotonicClock())
        self.all.append(sharing)
        self.tasks.append(asyncio.create_task(sharing.run()))
        return sharing


@pytest.fixture
async def routers(redis_server: RedisWorld, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Routers]:
    monkeypatch.setattr("router.quotas.sharing.SYNC_S", 0.02)
    monkeypatch.setattr("router.quotas.sharing.CHECK_S", 0.02)
    redis_server.command("FLUSHALL")
    routers = Routers(redis_server)
    yield routers
    for task in routers.tasks:
        task.cancel()
    await asyncio.gather(*routers.tasks, return_exceptions=True)
    for sharing in routers.all:
        await sharing.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not holds():
            await asyncio.sleep(0.01)  # Redis and the tasks go on meanwhile


def settle(sharing: Sharing, hold: Hold, tokens: int) -> None:
    sharing.book.settle(hold, tokens, sharing._clock.now())


async def test_two_routers_on_redis_admit_what_one_limit_has(routers: Routers) -> None:
    a, b = routers.start(20.0), routers.start(20.0)
    limits = KeyLimits(tokens_per_min=6000, requests_per_min=100)
    num, began = 0, time.monotonic()
    for _ in range(130):
        for sharing in (a, b):
            verdict = await sharing.take("t", limits, Demand(10, 0))
            if isinstance(verdict, Hold):
                num += 1
                settle(sharing, verdict, 10)
    assert 100 <= num <= 100 * (1 + (time.monotonic() - began) / 60 + 2 * SLICE)
    assert is_up(a) == (1.0, 0.0)


@pytest.mark.parametrize("how", ["frozen", "gone", "full", "read-only", "flushed"])
async def test_b137_no_trouble_of_redis_stops_requests(
    routers: Routers, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = routers.world
    sharing = routers.start(0.3)
    settle(sharing, await admitted(sharing), 10)
    await until(lambda: not sharing.book.is_lost)
    losses = is_up(sharing)[1]
    match how:
        case "frozen":
            world.freeze()
        case "gone":
            world.end()
        case "full":
            world.command("CONFIG", "SET", "maxmemory", 1)
        case "read-only":
            world.command("REPLICAOF", "127.0.0.1", 1)
        case "flushed":
            world.command("FLUSHALL")
            world.command("SCRIPT", "FLUSH")
    try:
        holds = [await admitted(sharing, name=f"new-{number}") for number in range(10)]
        holds += [await admitted(sharing, 20) for _ in range(10)]
        if how != "flushed":
            await until(lambda: sharing.book.is_lost)
            assert caplog.text.count(AWAY) >= 1
    finally:
        match how:
            case "frozen":
                world.thaw()
            case "gone":
                world.start()
            case "full":
                world.command("CONFIG", "SET", "maxmemory", 0)
            case "read-only":
                world.command("REPLICAOF", "NO", "ONE")
    await until(lambda: not sharing.book.is_lost)
    for hold in holds:
        settle(sharing, hold, int(hold.num_tokens))
    assert sharing.book.quiet()
    if how != "flushed":
        assert is_up(sharing)[1] > losses

    await until(lambda: world.command("EXISTS", "{baton}:used:t") == 1)  # it shares again
