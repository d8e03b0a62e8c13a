"""Roles that change while the cluster serves, alive: feeds `router.role_shifts` and asks the launcher.

1. `observe` sees every lifecycle event; each answer adds to what is known of the load.
2. `run` asks every few seconds. A search of roles runs on a thread, since it may take longer than a token.
3. A shift is a wish to the launcher, which drains that worker and starts it in the other role
   (`cluster.launch_supervisor`); that it came about is seen when the worker registers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from cluster.clock import Clock
from cluster.ids import RequestId, WorkerId
from cluster.request import LifecycleEvent
from cluster.wire.messages import Role
from router.conductor_io import Ended, Lifecycle
from router.delivery import WorkerStatus
from router.role_shifts import Member, RoleShifts, Shift

logger = logging.getLogger(__name__)

Wish = Callable[[str, str], None]  # (worker, role)


class RoleWatch:
    """Owns the wishes of one router. Belongs to one event loop."""

    def __init__(self, shifts: RoleShifts, wish: Wish, clock: Clock) -> None:
        self._shifts = shifts
        self._wish = wish
        self._clock = clock
        self._lengths: dict[RequestId, tuple[int, int]] = {}  # (prompt, output) of requests that run

    def observe(self, action: Lifecycle | Ended) -> None:
        """A watcher of the conductor's driver."""
        if isinstance(action, Ended):
            num_prompt, num_output = self._lengths.pop(action.request, (0, 0))
            if num_output > 0:
                computed = num_prompt - action.summary.cached_tokens
                self._shifts.answered(computed, num_output, self._clock.now())
        elif action.event is LifecycleEvent.ARRIVED:
            self._lengths[action.request] = action.num_tokens, 0
        elif action.event is LifecycleEvent.FINISHED and action.request in self._lengths:
            self._lengths[action.request] = self._lengths[action.request][0], action.num_tokens

    async def run(self, workers: Callable[[], Iterable[WorkerStatus]]) -> None:
        """Until cancelled. `workers` as they are now."""
        while True:
            await asyncio.sleep(self._shifts.settings.interval_s)
            try:
                await self._plan(workers)
            except Exception:
                logger.exception("roles stay as they are this time: their planner failed")

    async def _plan(self, workers: Callable[[], Iterable[WorkerStatus]]) -> None:
        question = self._shifts.question(_members(workers()), self._clock.now())
        if question is not None:
            answer = await asyncio.to_thread(question.answer)
            shift = self._shifts.take(answer, _members(workers()), self._clock.now())
            if shift is not None:
                self._ask_for(shift)

    def ask(self, worker: str, role: Role, workers: Iterable[WorkerStatus]) -> None:
        """A person wants it.

        Raises:
            InvalidRequest: it cannot be done, or not now.
        """
        now = self._clock.now()
        self._ask_for(self._shifts.ask(WorkerId(worker), role, _members(workers), now))

    def picture(self, workers: Iterable[WorkerStatus]) -> dict[str, Any] | None:
        """The shift under way, as `/cluster` shows it."""
        self._shifts.look(_members(workers), self._clock.now())
        shift = self._shifts.under_way
        return None if shift is None else {"worker": shift.worker, "role": shift.role.value, "why": shift.why}

    def _ask_for(self, shift: Shift) -> None:
        logger.info("%s is to become a %s worker: %s", shift.worker, shift.role.value, shift.why)
        self._wish(shift.worker, shift.role.value)


def _members(workers: Iterable[WorkerStatus]) -> list[Member]:
    return [
        Member(
            one.worker,
            one.role,
            one.load.step_model,
            is_ready=one.state == "ready",
            num_sequences=one.load.running + one.load.waiting,
            epoch=one.epoch,
        )
        for one in workers
    ]
