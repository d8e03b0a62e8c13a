"""Who uses how much of what they may: the quotas of one router. Sans-IO.

1. `look` says, before a request is read, whether its tenant may send one at all now.
2. `take` counts the request, reserves its prompt and the most it may generate, and holds one of the tenant's
   places; or says which limit is in the way and for how long (`Wait`).
3. `settle` gives the place back, and what was reserved and not used. A request that we failed before its
   first token is not counted either.

All or nothing: a refused request has taken nothing of any limit. One that asks for more tokens than a whole
minute has takes all of them, and what it then uses beyond is a debt; one whose *prompt* is longer can never
be served, and is told so (`retry_after_s` None).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.quotas.limits import Demand, KeyLimits, Limit
from router.quotas.meter import Meter

_SWEEP_S = 60.0
_UNKNOWN_HOLD_S = 1.0  # how long a request lasts, while none has ended
_MAX_WAIT_S = 60.0
_MIN_WAIT_S = 0.05
_MEMORY = 0.2  # weight of the latest request in the mean


class Wait(msgspec.Struct, frozen=True):
    """Refused. None: for ever, with these limits."""

    limit: Limit
    retry_after_s: float | None


class Hold(msgspec.Struct, frozen=True, eq=False):
    """One admitted request: what it has taken until it is settled."""

    tenant: str
    num_tokens: float  # reserved
    taken_at: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one limit per minute. `reset_s`: until all of it is back."""

    limit: int
    remaining: int
    reset_s: float


class Tenant(msgspec.Struct):
    """What is counted for one of them. `limits`: as of its latest request."""

    limits: KeyLimits
    requests: Meter = msgspec.field(default_factory=Meter)
    tokens: Meter = msgspec.field(default_factory=Meter)
    holds: set[Hold] = msgspec.field(default_factory=set)
    mean_hold_s: float | None = None

    def meter(self, limit: Limit) -> Meter:
        return self.requests if limit is Limit.REQUESTS else self.tokens

    def concurrent_wait(self, most: int | None) -> Wait | None:
        """All its places are taken: one will be free when the next of its requests ends."""
        if most is None or len(self.holds) < most:
            return None
        mean_s = _UNKNOWN_HOLD_S if self.mean_hold_s is None else self.mean_hold_s
        wait_s = min(max(mean_s / max(1, len(self.holds)), _MIN_WAIT_S), _MAX_WAIT_S)
        return Wait(Limit.CONCURRENT, wait_s)

    def hold(self, tenant: str, num_tokens: float, now: float) -> Hold:
        hold = Hold(tenant, num_tokens, now)
        self.holds.add(hold)
        return hold

    def let_go(self, hold: Hold, now: float) -> None:
        """Raises `KeyError` for one that was settled: a bug of ours."""
        self.holds.remove(hold)
        lasted_s = now - hold.taken_at
        mean_s = self.mean_hold_s
        self.mean_hold_s = lasted_s if mean_s is None else mean_s + _MEMORY * (lasted_s - mean_s)


def reserved_tokens(demand: Demand, limits: KeyLimits) -> float | None:
    """What a request reserves; None: its prompts alone are longer than what a minute has."""
    per_min = limits.tokens_per_min
    if per_min is None:
        return 0.0
    return None if demand.num_prompt_tokens > per_min else min(demand.num_tokens, per_min)


def most_pressing(waits: list[Wait]) -> Wait | None:
    """The one that lasts longest; none for ever."""
    return max(waits, key=lambda wait: wait.retry_after_s or 0.0, default=None)


class QuotaBook:
    """Owns the meters and the holds of all tenants. `now` never goes back."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._sweep_at = 0.0

    def look(self, name: str, limits: KeyLimits, now: float) -> Wait | None:
        """Whether a request without any tokens would be refused now. Takes nothing."""
        tenant = self._tenants.get(name)
        return None if tenant is None else self._wait(tenant, limits, 1.0, now)

    def take(self, name: str, limits: KeyLimits, demand: Demand, now: float) -> Hold | Wait:
        self._sweep(now)
        num_tokens = reserved_tokens(demand, limits)
        if num_tokens is None:
            return Wait(Limit.TOKENS, None)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(limits)
        tenant.limits = limits
        wait = self._wait(tenant, limits, num_tokens, now)
        if wait is not None:
            return wait
        if limits.requests_per_min is not None:
            tenant.requests.add(1.0)
        tenant.tokens.add(num_tokens)
        return tenant.hold(name, num_tokens, now)

    def settle(self, hold: Hold, num_tokens: int, now: float, *, counts: bool = True) -> None:
        """The request is over and has used `num_tokens`. Not `counts`: it was failed by us, unanswered."""
        tenant = self._tenants[hold.tenant]
        tenant.let_go(hold, now)
        limits = tenant.limits
        if limits.tokens_per_min is not None:
            tenant.tokens.drain(limits.tokens_per_min, now)
            tenant.tokens.add(num_tokens - hold.num_tokens)
        if limits.requests_per_min is not None and not counts:
            tenant.requests.drain(limits.requests_per_min, now)
            tenant.requests.add(-1.0)

    def standing(self, name: str, limits: KeyLimits, now: float) -> dict[Limit, Standing]:
        """What a tenant is told of its limits per minute."""
        tenant = self._tenants.get(name) or Tenant(limits)
        told = {}
        for limit, per_min in limits.rate_limits().items():
            used = tenant.meter(limit).drain(per_min, now)
            told[limit] = Standing(per_min, max(0, int(per_min - used)), used * 60.0 / per_min)
        return told

    def num_held(self, name: str) -> int:
        """Requests of a tenant that run or wait."""
        tenant = self._tenants.get(name)
        return 0 if tenant is None else len(tenant.holds)

    def quiet(self) -> bool:
        """Whether nothing is held."""
        return not any(tenant.holds for tenant in self._tenants.values())

    def _wait(self, tenant: Tenant, limits: KeyLimits, num_tokens: float, now: float) -> Wait | None:
        waits = []
        for limit, meter, cost, per_min in (
            (Limit.REQUESTS, tenant.requests, 1.0, limits.requests_per_min),
            (Limit.TOKENS, tenant.tokens, num_tokens, limits.tokens_per_min),
        ):
            if per_min is not None and (wait_s := meter.wait_s(cost, per_min, now)) > 0:
                waits.append(Wait(limit, wait_s))
        if (full := tenant.concurrent_wait(limits.concurrent)) is not None:
            waits.append(full)
        return most_pressing(waits) if waits else None

    def _sweep(self, now: float) -> None:
        """Forget those that have used nothing for as long as anything is remembered."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_S
        for name, tenant in list(self._tenants.items()):
            rates = tenant.limits.rate_limits()
            if not tenant.holds and not any(tenant.meter(limit).drain(rates[limit], now) for limit in rates):
                del self._tenants[name]
