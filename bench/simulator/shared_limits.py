"""Redis, and what each router has of the limits that several of them share, in virtual time.

1. A router admits from its slices (`router.quotas.slices.SliceBook`, the live object). A request that finds
   too little waits for a lease; those of one tenant wait for each other's (`router.quotas.sharing`).
2. A lease is a call that takes time there and back. Redis gone: it is not answered, and given up after
   `DEADLINE_S`; what it asked for may have been granted all the same.
3. Every `SYNC_S` each router leases for all its tenants; while Redis is gone it looks, each `CHECK_S`,
   whether it is back. One that comes back empty has forgotten who used what.
4. At the end nobody keeps a slice, and no tenant got more than the bound of `router.quotas.slices`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from bench.simulator.events import EventQueue
from bench.simulator.process import Process
from bench.simulator.violation import Violation
from cluster.ids import RouterId
from cluster.shared_state import LeaseAsk, LeaseGrant, Memory, MemoryState
from router.quotas.book import Hold, Wait
from router.quotas.limits import MINUTE_S, Demand, KeyLimits
from router.quotas.sharing import CHECK_S, SYNC_S
from router.quotas.slices import SLICE, Short, SliceBook

TTL_S: Final = 10.0
DEADLINE_S: Final = 0.05
_DELAY_S: Final = 0.001

T = TypeVar("T")
Then = Callable[[Hold | Wait], None]


class Redis:
    """The shared state, by its own clock. `spent`: tokens that each tenant used, through all routers."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self.memory = Memory(_QueueClock(queue))
        self.is_away = False
        self.num_losses = 0
        self.spent: Counter[str] = Counter()
        self.sharers: list[SharedLimits] = []

    def go_away(self) -> None:
        self.is_away = True
        self.num_losses += 1

    def come_back(self, *, empty: bool) -> None:
        self.is_away = False
        if empty:
            for kept in (self.memory.meters, self.memory.slots, self.memory.routers):
                kept.clear()

    def call(
        self, asker: Process, ask: Callable[[], Coroutine[Any, Any, T]], then: Callable[[T | None], None]
    ) -> None:
        """`then` has the answer, or None after `DEADLINE_S`, while `asker` lives."""
        late_at = self._queue.now + DEADLINE_S
        self._queue.after(_DELAY_S, self._arrive, asker, ask, then, late_at)

    def _arrive(
        self, asker: Process, ask: Callable[[], Coroutine[Any, Any, T]], then: Any, late_at: float
    ) -> None:
        answer = None if self.is_away else _at_once(ask())
        self._queue.after(_DELAY_S, self._answer, asker, answer, then, late_at)

    def _answer(self, asker: Process, answer: Any, then: Any, late_at: float) -> None:
        if answer is None or self.is_away:
            asker.later(late_at - self._queue.now, then, None)
        else:
            asker.later(0.0, then, answer)

    def check_places(self, tenant: str, limits: KeyLimits) -> None:
        """As long as nothing kept a router or Redis from saying what it holds.

        Raises:
            Violation: more of a tenant's requests run than may at once.
        """
        if (
            limits.concurrent is None
            or self.num_losses
            or any(not sharer.is_unharmed for sharer in self.sharers)
        ):
            return
        held = sum(sharer.book.num_held(tenant) for sharer in self.sharers)
        if held > limits.concurrent:
            raise Violation("limits", f"{held} requests of {tenant} run, at most {limits.concurrent} may")

    def check_bound(self, limits: KeyLimits) -> None:
        """
        Raises:
            Violation: a tenant got more than it may, through all routers together.
        """
        if limits.tokens_per_min is None:
            return
        minutes = 1 + self._queue.now / MINUTE_S
        most = limits.tokens_per_min * (minutes + SLICE * len(self.sharers))
        if self.num_losses:  # each life of a router may have served by itself meanwhile
            most += limits.tokens_per_min * minutes * (len(self.sharers) + self.num_losses)
        for tenant, spent in self.spent.items():
            if spent > most:
                raise Violation("limits", f"{tenant} used {spent} tokens, at most {most:.0f} are allowed")


class SharedLimits:
    """One router's part: `router.quotas.sharing.Sharing` without an event loop."""

    def __init__(self, redis: Redis, router: Process, name: RouterId) -> None:
        self.book = SliceBook()
        self._redis = redis
        self._router = router
        self._state = MemoryState(redis.memory, name, TTL_S)
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # tenant |-> who leases, and who waits to
        redis.sharers.append(self)
        router.later(SYNC_S, self._sync)

    @property
    def is_unharmed(self) -> bool:
        """Its router lives, was never stopped, and its clock never jumped."""
        return self._router.is_alive and not self._router.is_stopped and not self._router.undisturbed_since

    def take(self, tenant: str, limits: KeyLimits, demand: Demand, then: Then) -> None:
        """`then` has the verdict, now or after a lease."""

        def decided(verdict: Hold | Wait) -> None:
            self._redis.check_places(tenant, limits)
            then(verdict)

        verdict = self.book.take(tenant, limits, demand, self._router.now())
        if isinstance(verdict, Short):
            self._in_turn(tenant, lambda: self._take_again(tenant, limits, demand, decided))
        else:
            decided(verdict)

    def settle(self, hold: Hold, num_tokens: int) -> None:
        self._redis.spent[hold.tenant] += num_tokens
        self.book.settle(hold, num_tokens, self._router.now())

    def quiet(self) -> bool:
        """Nothing is held, nobody waits, and all slices were brought back."""
        return self.book.quiet() and not self._lines and not self.book.due()

    # ---- requests

    def _take_again(self, tenant: str, limits: KeyLimits, demand: Demand, then: Then) -> None:
        """Its turn: what others leased meanwhile may do."""
        verdict = self.book.take(tenant, limits, demand, self._router.now())
        if isinstance(verdict, Short):
            self._lease(tenant, demand, lambda: self._leased(tenant, limits, demand, then))
        else:
            self._next(tenant)
            then(verdict)

    def _leased(self, tenant: str, limits: KeyLimits, demand: Demand, then: Then) -> None:
        now = self._router.now()
        verdict = self.book.take(tenant, limits, demand, now)
        if isinstance(verdict, Short):
            verdict = self.book.refused(tenant, demand, now)
        self._next(tenant)
        then(verdict)

    # ---- leases

    def _lease(self, tenant: str, demand: Demand | None, then: Callable[[], None]) -> None:
        ask = self.book.ask(tenant, demand, self._router.now())
        self._redis.call(
            self._router, lambda: self._state.lease(ask), lambda grant: self._answered(ask, grant, then)
        )

    def _answered(self, ask: LeaseAsk, grant: LeaseGrant | None, then: Callable[[], None]) -> None:
        if grant is None:
            self.book.unanswered(ask)
            self.book.lost(self._router.now())
        else:
            self.book.granted(ask, grant, self._router.now())
        then()

    def _in_turn(self, tenant: str, call: Callable[[], None]) -> None:
        line = self._lines.setdefault(tenant, deque())
        line.append(call)
        if len(line) == 1:
            call()

    def _next(self, tenant: str) -> None:
        line = self._lines[tenant]
        line.popleft()
        if line:
            self._router.later(0.0, line[0])
        else:
            del self._lines[tenant]

    # ---- now and then

    def _sync(self) -> None:
        if self.book.is_lost or not self.book.due():
            self._redis.call(self._router, self._state.check, self._checked)
        else:
            self._sync_tenants()
        self._router.later(CHECK_S if self.book.is_lost else SYNC_S, self._sync)

    def _checked(self, num_routers: int | None) -> None:
        if num_routers is None:
            self.book.lost(self._router.now())
        else:
            self.book.found(num_routers)
            self._sync_tenants()

    def _sync_tenants(self) -> None:
        for tenant in self.book.due():
            self._in_turn(tenant, partial(self._routine, tenant))

    def _routine(self, tenant: str) -> None:
        if self.book.is_lost or tenant not in self.book.due():
            self._next(tenant)
        else:
            self._lease(tenant, None, lambda: self._next(tenant))


class _QueueClock:
    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def now(self) -> float:
        return self._queue.now


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a call of the memory's waits")
