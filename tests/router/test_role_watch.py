"""The live part of roles that change: lifecycle events in, wishes to the launcher out."""

from __future__ import annotations

import asyncio

import pytest

from cluster.clock import MonotonicClock
from cluster.errors import InvalidRequest
from cluster.ids import RequestId
from cluster.request import LifecycleEvent
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.messages import Role, WorkerLoad
from router.conductor_io import Ended, Lifecycle
from router.delivery import RequestSummary, WorkerStatus
from router.planner import Planner
from router.role_shifts import RoleShifts, ShiftSettings
from router.role_watch import RoleWatch
from tests.support.scripted_cluster import worker

H100 = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
SETTINGS = ShiftSettings(
    interval_s=0.01, least_answers=8, planner=Planner(gain=0.1, patience=2, may_only_decode=False)
)
E = LifecycleEvent


def pool() -> list[WorkerStatus]:
    load = WorkerLoad(step_model=H100)
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    return [worker(f"worker-{at}", role, load=load) for at, role in enumerate(roles)]


class World:
    def __init__(self) -> None:
        self.wishes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.shifts = RoleShifts(Targets(0.5, 0.025), 3, SETTINGS)
        self.watch = RoleWatch(self.shifts, lambda *wish: self.wishes.put_nowait(wish), MonotonicClock())

    def serve(self, name: str, num_prompt: int, num_output: int, *, end: LifecycleEvent = E.FINISHED) -> None:
        request = RequestId(name)
        self.watch.observe(Lifecycle(request, E.ARRIVED, 0.0, num_tokens=num_prompt))
        self.watch.observe(Lifecycle(request, end, 0.0, num_tokens=num_output))
        self.watch.observe(Ended(request, RequestSummary.unknown(attempts=1)))


async def test_a_load_that_wants_other_roles_becomes_a_wish() -> None:
    world = World()
    running = asyncio.create_task(world.watch.run(pool))
    try:
        for number in range(SETTINGS.least_answers):
            world.serve(f"r{number}", 200, 800)
        async with asyncio.timeout(20):
            assert await world.wishes.get() == ("worker-0", "decode")
        assert world.watch.picture(pool()) is not None
        assert world.wishes.empty(), "one at a time"
    finally:
        running.cancel()


def test_requests_that_have_no_answer_say_nothing_of_lengths() -> None:
    world = World()
    for number in range(2 * SETTINGS.least_answers):
        world.serve(f"r{number}", 200, 5, end=E.ABORTED)
    assert not world.shifts._answers
    world.serve("answered", 200, 5)
    assert [length for _, *length in world.shifts._answers] == [[200, 5]]


async def test_by_hand_a_wish_goes_out_at_once_and_shows_until_it_has_come_about() -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.watch.ask("worker-2", Role.PREFILL, pool())
    world.watch.ask("worker-1", Role.DECODE, pool())
    assert world.wishes.get_nowait() == ("worker-1", "decode")
    told = {"worker": "worker-1", "role": "decode", "why": "asked for by hand"}
    assert world.watch.picture(pool()) == told
    done = [one if one.worker != "worker-1" else worker("worker-1", Role.DECODE) for one in pool()]
    assert world.watch.picture(done) is None
