"""Carries out what the supervisor decides: processes in, events out. Holds no decision of its own.

1. `run` places every role and waits until all have imported their code and the model is prepared.
2. It then loops: actions of the supervisor → calls on processes; their ends, their readiness, signals and the
   passing of deadlines → events. Each life of a role (name, epoch) is one task. One that serves is asked for
   a sign of life every second; one that stays silent, twice, hangs.
3. It returns with the supervisor's `Finish`. Killing what is left and closing the session is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

from cluster.clock import Clock
from cluster.errors import BatonError
from cluster.launch_events import (
    Action,
    AllReady,
    Become,
    Drain,
    Event,
    Exited,
    Finish,
    Hung,
    Kill,
    Prepared,
    Ready,
    Remain,
    RestartRequested,
    Say,
    ShiftRequested,
    Start,
    StopRequested,
    Tick,
)
from cluster.launch_plan import RoleSpec
from cluster.launch_session import Placed, Session
from cluster.launch_supervisor import Supervisor
from cluster.role_config import RouterConfig

PROBE_INTERVAL_S: Final = 1.0
SILENCE_S: Final = 4.0
SECOND_LOOK_S: Final = 1.0  # this process, too, may have stood still
WISH_S: Final = 30.0  # that a router is asked at a time


class Report(Protocol):
    """What the launcher tells a person. `progress` comes from another thread."""

    def phase(self, name: str) -> None:
        """`name` begins, the phase before it is over."""
        ...

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...

    def say(self, text: str) -> None: ...

    def ready(self) -> None:
        """Every role serves."""
        ...

    def stopping(self) -> None:
        """The first signal came, after the start: what is open is about to drain."""
        ...


class Driver:
    """Runs one cluster once."""

    def __init__(
        self,
        session: Session,
        specs: Sequence[RoleSpec],
        supervisor: Supervisor,
        report: Report,
        clock: Clock,
    ) -> None:
        self._session = session
        self._specs = {spec.name: spec for spec in specs}
        self._supervisor = supervisor
        self._report = report
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._placed: dict[str, Placed] = {}  # placed before they are to start
        self._loads: dict[str, asyncio.Task[str]] = {}  # theirs: "" or why it cannot serve
        self._alive: dict[tuple[str, int], Placed] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._start_up: asyncio.Task[str] | None = None
        self._is_stopping = False

    def request_stop(self) -> None:
        """A signal came: the first drains, the next ends everything at once."""
        is_first, self._is_stopping = not self._is_stopping, True
        if self._start_up is not None and not self._start_up.done():
            self._start_up.cancel()  # nothing serves yet, there is nothing to drain
        elif is_first:
            self._report.stopping()  # before anything drains: it may ask how much there is
        self._events.put_nowait(StopRequested())

    def request_restart(self) -> None:
        """A signal came: replace the workers, one after the other."""
        self._events.put_nowait(RestartRequested())

    async def run(self, prepared: Future[str]) -> Finish:
        """`prepared` is the model's directory, or the `ModelError` why there is none."""
        self._start_up = asyncio.create_task(self._place_all(asyncio.wrap_future(prepared)))
        try:
            model_dir = await self._start_up
        except BatonError as error:
            return Finish(1, str(error))
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            return Finish(0, None)
        self._report.phase("workers")
        async with asyncio.TaskGroup() as group:
            finish = await self._loop(group, model_dir)
            for life in self._lives:
                life.cancel()
        return finish

    def kill_all(self) -> None:
        for load in self._loads.values():
            load.cancel()
        self._loads.clear()
        for placed in (*self._placed.values(), *self._alive.values()):
            placed.kill()
        self._placed.clear()
        self._alive.clear()

    async def _place_all(self, prepared: asyncio.Future[str]) -> str:
        """The model's directory, once it is known. Every role's process starts meanwhile and goes on to serve
        as soon as it is up; a process that cannot be placed is found out by its `_live`.

        Raises:
            BatonError: the model cannot be prepared.
        """
        for name in self._specs:
            self._place(name)
        return await prepared

    def _place(self, name: str) -> asyncio.Task[str]:
        """Its process, before it is to serve."""
        placed = self._placed[name] = self._session.place(self._specs[name])
        load = self._loads[name] = asyncio.create_task(placed.load())
        return load

    async def _await_prepared(self, name: str, load: asyncio.Task[str]) -> None:
        """Its next process is up, or never will be."""
        await asyncio.wait([load])
        if not load.cancelled():  # else it is not wanted any more
            self._events.put_nowait(Prepared(name, load.result()))

    async def _loop(self, group: asyncio.TaskGroup, model_dir: str) -> Finish:
        actions = self._supervisor.start(self._clock.now())
        while True:
            for action in actions:
                finish = self._carry_out(action, group, model_dir)
                if finish is not None:
                    return finish
            event = await self._next_event()
            actions = self._supervisor.handle(event, self._clock.now())

    async def _next_event(self) -> Event:
        deadline = self._supervisor.next_deadline()
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock.now())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    def _carry_out(self, action: Action, group: asyncio.TaskGroup, model_dir: str) -> Finish | None:
        match action:
            case Start(name, epoch):
                self._spawn(group, self._live(name, epoch, model_dir))
            case Become(name, kind):
                self._specs[name] = self._specs[name].in_role(kind)
                self._spawn(group, self._await_prepared(name, self._place(name)))
            case Remain(name, kind):
                self._specs[name] = self._specs[name].in_role(kind)
                if (load := self._loads.pop(name, None)) is not None:
                    load.cancel()
                if (unwanted := self._placed.pop(name, None)) is not None:
                    unwanted.kill()
            case Drain(name, epoch):
                if (placed := self._alive.get((name, epoch))) is not None:
                    self._spawn(group, placed.stop())
            case Kill(name, epoch):
                if (placed := self._alive.get((name, epoch))) is not None:
                    placed.kill()
            case Say(text):
                self._report.say(text)
            case AllReady():
                self._report.ready()
            case Finish():
                return action
        return None

    async def _live(self, name: str, epoch: int, model_dir: str) -> None:
        """From its start to its end."""
        spec = self._specs[name].started(epoch, model_dir)
        placed = self._placed.pop(name, None)
        if placed is None:
            placed = self._session.place(spec)
            load = asyncio.create_task(placed.load())
        else:
            load = self._loads.pop(name)
        self._alive[name, epoch] = placed
        cause = await load
        by_itself = False
        if not cause:
            beside = [asyncio.create_task(self._await_ready(placed, name, epoch))]
            if isinstance(spec.config, RouterConfig) and spec.config.plans_roles:
                beside.append(asyncio.create_task(self._follow_wishes(placed)))
            cause = await placed.run(spec)
            for task in beside:
                task.cancel()
            by_itself = not cause
        if by_itself:
            await placed.end()
        else:
            placed.kill()
        del self._alive[name, epoch]
        self._events.put_nowait(Exited(name, epoch, cause or "it ended by itself", by_itself))

    async def _await_ready(self, placed: Placed, name: str, epoch: int) -> None:
        if not await placed.wait_ready(self._supervisor.start_timeout_s):
            return
        self._events.put_nowait(Ready(name, epoch))
        while await placed.responds(SILENCE_S) or await placed.responds(SECOND_LOOK_S):
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._events.put_nowait(Hung(name, epoch))

    async def _follow_wishes(self, placed: Placed) -> None:
        """What a router asks for, until its process ends and this is cancelled."""
        while True:
            wish = await placed.next_wish(WISH_S)
            if wish is not None:
                self._events.put_nowait(ShiftRequested(*wish))

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)
