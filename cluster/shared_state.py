"""What routers share beside the workers: how much of each tenant's limits is left. Two kinds, one contract.

A router never asks for one request: it *leases* a slice of a limit and admits from that (`router.quotas`).

1. `LeaseAsk` names a tenant, and for each limit per minute what the router wants of it, the least that is of
   use, and what it brings back of an earlier lease (below 0: what it used while it could not ask).
2. The state drains its meters to now, takes back, and grants: all that is wanted, as much as there is, or
   nothing where that is below the least. Places for requests at once are granted up to what others hold.
3. A router that is not heard of for `ttl_s` holds no places any more, and is not counted.

Meters are those of `router.quotas.meter`: `used` drains at `per_min / 60` a second and never exceeds
`per_min` by a grant, so all grants of any t seconds come to at most `per_min * (1 + t / 60)`.

`MemoryState` is the contract in plain words, for routers of one process and for tests; `cluster.redis_state`
keeps it in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.clock import Clock
from cluster.errors import BatonError
from cluster.ids import RouterId

FORGET_S = 60.0  # a meter is kept for so long after it has drained


class SharedStateLost(BatonError):
    """It cannot be asked: not reached, not in time, or it refuses."""


@dataclass(frozen=True, slots=True)
class BucketAsk:
    """Of one limit per minute."""

    per_min: float
    want: float
    least: float = 0.0
    back: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """`slots`: how many requests at once this router wants to be able to run, `running` of which it does;
    `most_slots` None: there is no such limit."""

    tenant: str
    buckets: Mapping[str, BucketAsk] = field(default_factory=dict)  # by a name of the asker's
    most_slots: int | None = None
    slots: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class BucketGrant:
    """`used`: by all routers, this grant included."""

    granted: float
    used: float


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """`slots`: as many as asked for, or fewer; all of them are held until the next lease, or `ttl_s`."""

    buckets: Mapping[str, BucketGrant]
    slots: int
    num_routers: int  # heard of within `ttl_s`, this one included


class SharedState(Protocol):
    """One router's access. Every call raises `SharedStateLost` if it cannot be had; nothing waits longer than
    the deadline that the access was made with."""

    async def lease(self, ask: LeaseAsk) -> LeaseGrant: ...

    async def check(self) -> int:
        """Whether it can be written to; the number of routers."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Meter:
    used: float = 0.0
    at: float = 0.0


class Memory:
    """What is shared; each router's access is a `MemoryState`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.meters: dict[tuple[str, str], _Meter] = {}
        self.slots: dict[str, dict[RouterId, tuple[int, float]]] = {}  # tenant -> router -> (held, until)
        self.routers: dict[RouterId, float] = {}  # heard of until


class MemoryState:
    """Implements `SharedState`."""

    def __init__(self, memory: Memory, router: RouterId, ttl_s: float) -> None:
        self._memory = memory
        self._router = router
        self._ttl_s = ttl_s

    async def lease(self, ask: LeaseAsk) -> LeaseGrant:
        now = self._memory.clock.now()
        buckets = {name: self._grant(ask.tenant, name, bucket, now) for name, bucket in ask.buckets.items()}
        return LeaseGrant(buckets, self._slots(ask, now), self._hear(now))

    async def check(self) -> int:
        return self._hear(self._memory.clock.now())

    async def close(self) -> None:
        """It is not counted any more."""
        self._memory.routers.pop(self._router, None)

    def _grant(self, tenant: str, name: str, ask: BucketAsk, now: float) -> BucketGrant:
        meter = self._memory.meters.setdefault((tenant, name), _Meter(at=now))
        used = max(0.0, meter.used - ask.per_min / 60.0 * (now - meter.at))
        used = max(0.0, used - ask.back)
        granted = max(0.0, min(ask.want, ask.per_min - used))
        if granted < ask.least:
            granted = 0.0
        meter.used, meter.at = used + granted, now
        return BucketGrant(granted, meter.used)

    def _slots(self, ask: LeaseAsk, now: float) -> int:
        if ask.most_slots is None:
            return 0
        held = self._memory.slots.setdefault(ask.tenant, {})
        for router, (_, until) in list(held.items()):
            if until < now or router == self._router:
                del held[router]
        others = sum(number for number, _ in held.values())
        granted = max(0, min(ask.slots, ask.most_slots - others))
        if max(granted, ask.running) > 0:
            held[self._router] = (max(granted, ask.running), now + self._ttl_s)
        return granted

    def _hear(self, now: float) -> int:
        routers = self._memory.routers
        routers[self._router] = now + self._ttl_s
        for router, until in list(routers.items()):
            if until < now:
                del routers[router]
        return len(routers)
