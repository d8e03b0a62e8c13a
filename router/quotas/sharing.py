"""Keeps a `SliceBook` in touch with the state that routers share.

1. `take` admits from what is at hand. Only a request that finds too little waits for a lease, at most the
   deadline of the shared state; requests of one tenant wait for each other's.
2. `run` leases for every tenant that is here, each `SYNC_S`, and lets other routers know of this one.
3. A lease that fails means that the state is lost, for all tenants at once: nothing asks it any more but a
   check each `CHECK_S`. The log says so once, and once when it is back.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.clock import Clock
from cluster.metrics import Metrics
from cluster.shared_state import LeaseAsk, SharedState, SharedStateLost
from router.quotas.book import Hold, Wait
from router.quotas.limits import Demand, KeyLimits
from router.quotas.slices import Short, SliceBook

logger = logging.getLogger(__name__)

SYNC_S = 0.5
CHECK_S = 1.0


class Sharing:
    """Belongs to one event loop."""

    def __init__(self, state: SharedState, clock: Clock, metrics: Metrics) -> None:
        self.book = SliceBook()
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._locks: dict[str, asyncio.Lock] = {}
        metrics.observe_shared_state(is_up=True)

    async def take(self, name: str, limits: KeyLimits, demand: Demand) -> Hold | Wait:
        verdict = self.book.take(name, limits, demand, self._clock.now())
        if not isinstance(verdict, Short):
            return verdict
        async with self._lock(name):
            verdict = self.book.take(name, limits, demand, self._clock.now())
            if isinstance(verdict, Short):
                await self._lease(self.book.ask(name, demand, self._clock.now()))
                verdict = self.book.take(name, limits, demand, self._clock.now())
            if isinstance(verdict, Short):
                return self.book.refused(name, demand, self._clock.now())
            return verdict

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S if self.book.is_lost else SYNC_S)
            await self.sync()

    async def sync(self) -> None:
        """Lease for every tenant. Without any, say that this router is there, so that others count it; while
        the state is away, look whether it is back."""
        if (self.book.is_lost or not self.book.due()) and not await self._check():
            return
        for name in self.book.due():
            async with self._lock(name):
                if self.book.is_lost:
                    return
                await self._lease(self.book.ask(name, None, self._clock.now()))
        for name in self._locks.keys() - set(self.book.due()):
            if not self._locks[name].locked():
                del self._locks[name]

    async def close(self) -> None:
        """Bring everything back that is not in use."""
        for name in self.book.due():
            if not self.book.is_lost:
                await self._lease(self.book.ask(name, None, float("inf")))
        await self._state.close()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _lease(self, ask: LeaseAsk) -> None:
        try:
            grant = await self._state.lease(ask)
        except SharedStateLost as error:
            self.book.unanswered(ask)
            self._went_away(error)
        except asyncio.CancelledError:
            self.book.unanswered(ask)
            raise
        else:
            self.book.granted(ask, grant, self._clock.now())

    async def _check(self) -> bool:
        try:
            num_routers = await self._state.check()
        except SharedStateLost as error:
            self._went_away(error)
            return False
        if self.book.is_lost:
            logger.warning("quotas are shared again, by %d routers", num_routers)
            self._metrics.observe_shared_state(is_up=True)
        self.book.found(num_routers)
        return True

    def _went_away(self, error: SharedStateLost) -> None:
        if not self.book.is_lost:
            logger.warning("quotas are this router's own until the shared state is back: %s", error)
            self._metrics.observe_shared_state(is_up=False)
        self.book.lost(self._clock.now())
