"""The quotas of one of several routers: it admits from slices that it leases of what all share. Sans-IO.

1. `take` admits a request from what is at hand, without asking anybody. What is at hand is a slice of each
   limit, at most `SLICE` of a minute's, and places for requests at once.
2. Where that is too little it says `Short`: the caller leases (`ask`, `granted`) and takes again; what is
   still missing then is a `Wait`, and holds for all like it for a moment.
3. `settle` returns what was not used to the slice, and beyond it to the shared state with the next lease.
4. `due` names the tenants to lease for every now and then: slices are filled, places that nobody uses and
   slices of tenants that went away are brought back.
5. The shared state is lost (`lost`): from then on each router admits from its own meters, with its part of
   every limit (`limit / num_routers`, at least 1). When it is back (`found`), what was used meanwhile is told
   to it.

Bound: over any t seconds, N routers together admit at most `per_min * (1 + t / 60 + SLICE * N)`; while the
shared state is away also at most `per_min * (1 + t / 60)`, plus one `per_min` if it forgot what was used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cluster.shared_state import BucketAsk, LeaseAsk, LeaseGrant
from router.quotas.book import Hold, Standing, Tenant, Wait, most_pressing, reserved_tokens
from router.quotas.limits import MINUTE_S, Demand, KeyLimits, Limit
from router.quotas.meter import Meter

SLICE = 0.05  # of a minute's limit
IDLE_S = 2.0  # a tenant without requests for so long brings everything back
_DENIAL_S = 0.1  # what was just not to be had is not asked for again
_MIN_WAIT_S = 0.05
_ROUNDING = 1e-9  # of a cost


@dataclass(frozen=True, slots=True)
class Short:
    """Lease, and take again."""


@dataclass(frozen=True, slots=True)
class _Denial:
    """`amount` was not to be had; nobody asks for as much before `until`. It should be there at `free_at`."""

    amount: float
    until: float
    free_at: float


class _Slice(msgspec.Struct):
    """Of one limit per minute. `local` is the meter while the shared state is lost."""

    at_hand: float = 0.0
    back: float = 0.0  # for the shared state; below 0: a debt
    by_all: Meter = msgspec.field(default_factory=Meter)  # as of the last lease
    local: Meter = msgspec.field(default_factory=Meter)
    denial: _Denial | None = None

    def lacks(self, cost: float) -> bool:
        return self.at_hand < cost * (1 - _ROUNDING)

    def keep(self, most: float) -> None:
        """What is at hand beyond it goes back with the next lease."""
        beyond = max(0.0, self.at_hand - most)
        self.at_hand -= beyond
        self.back += beyond


class _Sharer(msgspec.Struct):
    """One tenant."""

    tenant: Tenant
    slices: dict[Limit, _Slice] = msgspec.field(default_factory=dict)
    slots: int = 0  # requests that may run at once by the last lease
    slots_denied_until: float = 0.0
    active_at: float = 0.0

    def slice(self, limit: Limit) -> _Slice:
        return self.slices.setdefault(limit, _Slice())

    @property
    def running(self) -> int:
        return len(self.tenant.holds)


class SliceBook:
    """Owns what this router has of every tenant's limits. `now` never goes back."""

    def __init__(self) -> None:
        self._sharers: dict[str, _Sharer] = {}
        self._num_routers = 1
        self.is_lost = False

    # ---- requests

    def look(self, name: str, limits: KeyLimits, now: float) -> Wait | None:
        """As `QuotaBook.look`, as far as it is known here."""
        sharer = self._sharers.get(name)
        if sharer is None:
            return None
        verdict = self._wait(sharer, limits, _costs(1.0, limits), now)
        return verdict if isinstance(verdict, Wait) else None

    def take(self, name: str, limits: KeyLimits, demand: Demand, now: float) -> Hold | Wait | Short:
        num_tokens = reserved_tokens(demand, limits)
        if num_tokens is None:
            return Wait(Limit.TOKENS, None)
        sharer = self._sharers.get(name)
        if sharer is None:
            sharer = self._sharers[name] = _Sharer(Tenant(limits))
        sharer.tenant.limits, sharer.active_at = limits, now
        costs = _costs(num_tokens, limits)
        if self.is_lost:
            parts = self._parts(limits)
            costs = {limit: min(cost, parts[limit]) for limit, cost in costs.items()}
        wait = self._wait(sharer, limits, costs, now)
        if wait is not None:
            return wait
        for limit, cost in costs.items():
            self._spend(sharer.slice(limit), cost)
        return sharer.tenant.hold(name, costs.get(Limit.TOKENS, 0.0), now)

    def settle(self, hold: Hold, num_tokens: int, now: float, *, counts: bool = True) -> None:
        """As `QuotaBook.settle`."""
        sharer = self._sharers[hold.tenant]
        sharer.tenant.let_go(hold, now)
        sharer.active_at = now
        for limit, per_min in sharer.tenant.limits.rate_limits().items():
            unused = hold.num_tokens - num_tokens if limit is Limit.TOKENS else float(not counts)
            part = sharer.slice(limit)
            if self.is_lost:
                part.local.drain(self._parts(sharer.tenant.limits)[limit], now)
                self._spend(part, -unused)
            else:
                part.at_hand += max(0.0, unused)
                part.back += min(0.0, unused)
                part.keep(_slice_size(per_min))

    def standing(self, name: str, limits: KeyLimits, now: float) -> dict[Limit, Standing]:
        """As `QuotaBook.standing`: what this router could still have, as far as it knows."""
        sharer = self._sharers.get(name) or _Sharer(Tenant(limits))
        told = {}
        for limit, per_min in limits.rate_limits().items():
            part, own = sharer.slice(limit), self._parts(limits)[limit]
            if self.is_lost:
                free = own - part.local.drain(own, now)
            else:
                free = part.at_hand + per_min - part.by_all.drain(per_min, now)
            free = min(max(0.0, free), per_min)
            told[limit] = Standing(per_min, int(free), (per_min - free) * MINUTE_S / per_min)
        return told

    def num_held(self, name: str) -> int:
        sharer = self._sharers.get(name)
        return 0 if sharer is None else sharer.running

    def quiet(self) -> bool:
        return not any(sharer.running for sharer in self._sharers.values())

    # ---- leases

    def due(self) -> list[str]:
        """Tenants to lease for now and then."""
        return list(self._sharers)

    def ask(self, name: str, demand: Demand | None, now: float) -> LeaseAsk:
        """A lease that covers a request which was `Short`, or (None) the routine one. What is brought back
        leaves this book with it, places too."""
        sharer = self._sharers[name]
        limits = sharer.tenant.limits
        num_tokens = None if demand is None else reserved_tokens(demand, limits)
        costs = {} if num_tokens is None else _costs(num_tokens, limits)
        is_idle = self._is_idle(sharer, now)
        buckets = {}
        for limit, per_min in limits.rate_limits().items():
            part, cost = sharer.slice(limit), costs.get(limit, 0.0)
            wanted = 0.0 if is_idle else _slice_size(per_min) + cost
            part.keep(wanted)
            least = max(0.0, cost - part.at_hand)
            buckets[limit.value] = BucketAsk(per_min, wanted - part.at_hand, least, part.back)
            part.back = 0.0
        slots = sharer.running + (0 if demand is None else 1 + sharer.running // 4)
        sharer.slots = min(sharer.slots, slots)  # others may have the rest before the answer is here
        return LeaseAsk(
            tenant=name,
            buckets=buckets,
            most_slots=limits.concurrent,
            slots=slots,
            running=sharer.running,
        )

    def granted(self, ask: LeaseAsk, grant: LeaseGrant, now: float) -> None:
        self._num_routers = max(1, grant.num_routers)
        sharer = self._sharers[ask.tenant]
        for limit in sharer.tenant.limits.rate_limits():
            bucket = grant.buckets.get(limit.value)
            if bucket is not None:
                part = sharer.slice(limit)
                part.at_hand += bucket.granted
                part.by_all = Meter(bucket.used, now)
                part.denial = None
                if self.is_lost:  # another lease was not answered meanwhile
                    part.keep(0.0)
        sharer.slots = grant.slots
        if self._is_idle(sharer, now) and not any(
            part.at_hand or part.back for part in sharer.slices.values()
        ):
            del self._sharers[ask.tenant]

    def refused(self, name: str, demand: Demand, now: float) -> Wait:
        """A lease was made for it and did not cover it."""
        sharer = self._sharers[name]
        limits = sharer.tenant.limits
        waits = []
        for limit, cost in _costs(reserved_tokens(demand, limits) or 0.0, limits).items():
            part, per_min = sharer.slice(limit), limits.rate_limits()[limit]
            if part.lacks(cost):
                wait_s = max(_MIN_WAIT_S, part.by_all.wait_s(cost - part.at_hand, per_min, now))
                part.denial = _Denial(cost, now + min(wait_s, _DENIAL_S), now + wait_s)
                waits.append(Wait(limit, wait_s))
            part.keep(_slice_size(per_min))
        full = None if limits.concurrent is None else sharer.tenant.concurrent_wait(sharer.slots)
        if full is not None:
            sharer.slots_denied_until = now + _DENIAL_S
            waits.append(full)
        wait = most_pressing(waits)
        assert wait is not None, "it was covered"
        return wait

    def unanswered(self, ask: LeaseAsk) -> None:
        """What it would have brought back is forgotten, since it may have arrived; a debt is not."""
        sharer = self._sharers.get(ask.tenant)
        for limit, part in sharer.slices.items() if sharer is not None else ():
            bucket = ask.buckets.get(limit.value)
            if bucket is not None:
                part.back += min(0.0, bucket.back)

    def lost(self, now: float) -> None:
        """The shared state is away."""
        if self.is_lost:
            return
        self.is_lost = True
        for sharer in self._sharers.values():
            limits = sharer.tenant.limits
            for limit, per_min in limits.rate_limits().items():
                part, own = sharer.slice(limit), self._parts(limits)[limit]
                free = max(0.0, per_min - part.by_all.drain(per_min, now)) / self._num_routers
                part.local = Meter(max(0.0, own - part.at_hand - free), now)
                part.keep(0.0)
                part.denial = None

    def found(self, num_routers: int) -> None:
        """The shared state is there. If it was lost, nothing is at hand."""
        self._num_routers = max(1, num_routers)
        if not self.is_lost:
            return
        self.is_lost = False
        for sharer in self._sharers.values():
            sharer.slots, sharer.slots_denied_until = 0, 0.0

    # ---- small parts

    def _parts(self, limits: KeyLimits) -> Mapping[Limit, float]:
        """This router's part of each limit per minute."""
        return {limit: max(1.0, value / self._num_routers) for limit, value in limits.rate_limits().items()}

    def _spend(self, part: _Slice, amount: float) -> None:
        if self.is_lost:
            part.local.add(amount)
            part.back -= amount
        else:
            part.at_hand -= amount

    def _wait(
        self, sharer: _Sharer, limits: KeyLimits, costs: Mapping[Limit, float], now: float
    ) -> Wait | Short | None:
        """Why what is at hand does not cover it."""
        waits, is_short = [], False
        for limit, cost in costs.items():
            part = sharer.slice(limit)
            if self.is_lost:
                wait_s = part.local.wait_s(cost, self._parts(limits)[limit], now)
                if wait_s > 0:
                    waits.append(Wait(limit, wait_s))
            elif part.lacks(cost):
                denial = part.denial
                if denial is not None and now < denial.until and cost >= denial.amount:
                    waits.append(Wait(limit, denial.free_at - now))
                else:
                    is_short = True
        if limits.concurrent is not None:
            most = max(1, limits.concurrent // self._num_routers) if self.is_lost else sharer.slots
            full = sharer.tenant.concurrent_wait(most)
            if full is not None and (self.is_lost or now < sharer.slots_denied_until):
                waits.append(full)
            elif full is not None:
                is_short = True
        return most_pressing(waits) or (Short() if is_short else None)

    def _is_idle(self, sharer: _Sharer, now: float) -> bool:
        return sharer.running == 0 and now - sharer.active_at > IDLE_S


def _costs(num_tokens: float, limits: KeyLimits) -> dict[Limit, float]:
    both = {Limit.REQUESTS: 1.0, Limit.TOKENS: num_tokens}
    return {limit: both[limit] for limit in limits.rate_limits()}


def _slice_size(per_min: float) -> float:
    """Of a limit so small that it would be less than one: no slice, every request is leased for."""
    size = SLICE * per_min
    return size if size >= 1.0 else 0.0
