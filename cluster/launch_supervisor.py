"""Who runs, who is restarted, when it is over: the launcher's decisions, sans-IO.

::

    STARTING ──Ready──► READY ──Exited──► WAITING ──due──► STARTING (epoch + 1)
        │                                    │
        └─ Exited, never ready before:       └─ too many in a row: GIVEN_UP
           the whole start fails
    any ──stop──► STOPPING ──Exited──► STOPPED

1. All roles start at epoch 1. One that ends before it was ever ready ends the start, with its cause.
2. A role that dies or hangs later is started again with the next epoch: at once the first time, then after
   growing waits. A healthy minute forgets earlier deaths. One that left by itself (SIGTERM drains a worker)
   is started again too, and that is no failure.
3. After `MAX_RESTARTS` in a row it is given up. The cluster goes on as long as it can serve: with a router
   and a decode worker.
4. A rolling restart drains the workers and starts their next epoch one after the other, each when the one
   before it serves: RESTARTING ──Exited──► STARTING (epoch + 1).
5. A shift does the same with one worker, whose next epoch has the other role; that process is placed first,
   while the worker still serves: SHIFTING ──Prepared or due──► RESTARTING. One at a time, while everybody
   serves, and never of the last decode worker. One that does not come up in its new role goes back.
6. A stop drains the router first, while the workers still serve it, then the workers; whoever outlives its
   deadline is killed. A second stop kills at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

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

MAX_RESTARTS: Final = 8
MAX_BACKOFF_S: Final = 10.0
HEALTHY_S: Final = 60.0
BRIEF_S: Final = 2.0  # a role that ends by itself this soon after it served has failed
STOP_MARGIN_S: Final = 2.0  # beyond the drain grace
PREPARE_S: Final = 10.0  # the next process may have no place before this one has ended
WORKER_STOP_S: Final = 5.0  # the router has drained: nothing of a client is left on them
FORCED_EXIT_CODE: Final = 130


class RoleState(Enum):
    STARTING = auto()
    READY = auto()
    WAITING = auto()  # for its next start
    SHIFTING = auto()  # serves while the process of its next role starts
    RESTARTING = auto()  # drains, to be started again
    STOPPING = auto()
    STOPPED = auto()
    GIVEN_UP = auto()


_LEAVING: Final = frozenset({RoleState.SHIFTING, RoleState.RESTARTING})  # its end is no failure
_RUNNING: Final = frozenset({RoleState.STARTING, RoleState.READY, RoleState.STOPPING} | _LEAVING)


@dataclass(slots=True)
class _Role:
    name: str
    kind: str  # "router" | "prefill" | "decode"
    kind_before: str | None = None  # shifted, and not ready since
    state: RoleState = RoleState.STARTING
    epoch: int = 1
    deadline: float | None = None  # of the state
    ready_at: float | None = None  # of this epoch
    was_ready: bool = False
    num_failures: int = 0  # in a row


@dataclass(slots=True)
class Supervisor:
    """`roles` maps name → "router" | "prefill" | "decode". Single owner of every role's state and epoch."""

    roles: Iterable[tuple[str, str]]
    start_timeout_s: float
    drain_grace_s: float
    _roles: dict[str, _Role] = field(init=False)
    _num_stops: int = field(init=False, default=0)
    _to_restart: list[str] = field(init=False, default_factory=list)
    _is_rolling: bool = field(init=False, default=False)
    _announced: bool = field(init=False, default=False)
    _finished: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._roles = {name: _Role(name, kind) for name, kind in self.roles}

    def start(self, now: float) -> list[Action]:
        return [self._start(role, now) for role in self._roles.values()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`. Events of earlier epochs, and all after `Finish`, change nothing."""
        if self._finished:
            return []
        match event:
            case Ready():
                return self._on_ready(event, now)
            case Exited():
                return self._on_exited(event, now)
            case Hung():
                return self._on_hung(event, now)
            case RestartRequested():
                return self._on_restart(now)
            case ShiftRequested(name, kind):
                return self._on_shift(name, kind, now)
            case Prepared(name, cause):
                role = self._roles[name]
                return self._on_prepared(role, cause, now) if role.state is RoleState.SHIFTING else []
            case StopRequested():
                return self._on_stop(now)
            case Tick():
                return self._on_tick(now)

    def next_deadline(self) -> float | None:
        """When `Tick` is due."""
        return min(
            (role.deadline for role in self._roles.values() if role.deadline is not None), default=None
        )

    def state(self, role: str) -> RoleState:
        return self._roles[role].state

    def _on_ready(self, event: Ready, now: float) -> list[Action]:
        role = self._roles[event.role]
        if role.epoch != event.epoch or role.state is not RoleState.STARTING:
            return []
        role.state, role.deadline, role.ready_at = RoleState.READY, None, now
        was_ready, role.was_ready = role.was_ready, True
        kind_before, role.kind_before = role.kind_before, None
        if was_ready:
            how = "again" if kind_before is None else f"as a {role.kind} worker"
            return [Say(f"{role.name} serves {how} (epoch {role.epoch})"), *self._continue_restart(now)]
        if not self._announced and all(known.was_ready for known in self._roles.values()):
            self._announced = True
            return [AllReady()]
        return []

    def _on_exited(self, event: Exited, now: float) -> list[Action]:
        role = self._roles[event.role]
        if role.epoch != event.epoch or role.state not in _RUNNING:
            return []
        if role.state is RoleState.STOPPING:
            role.state, role.deadline = RoleState.STOPPED, None
            return self._continue_stop(now)
        served = role.state is RoleState.READY and role.ready_at is not None
        if role.state in _LEAVING:
            return [self._start_next(role, now)]
        if event.by_itself and served and now - (role.ready_at or 0.0) >= BRIEF_S and not self._num_stops:
            text = f"{role.name} left and is restarted as epoch {role.epoch + 1}"
            return [Say(text), self._start_next(role, now)]
        return self._fail(role, event.cause, now)

    def _on_hung(self, event: Hung, now: float) -> list[Action]:
        role = self._roles[event.role]
        if role.epoch != event.epoch or role.state not in (RoleState.READY, *_LEAVING):
            return []
        kill = Kill(role.name, role.epoch)
        if role.state in _LEAVING:
            return [Say(f"{role.name} hung while it drained: killed"), kill, self._start_next(role, now)]
        return [kill, *self._fail(role, "it hung and was killed", now)]

    def _on_restart(self, now: float) -> list[Action]:
        if self._num_stops:
            return []
        if self._is_rolling:
            return [Say("a rolling restart is under way already")]
        workers = [role for role in self._roles.values() if role.kind != "router"]
        if not all(role.was_ready for role in self._roles.values()):
            return [Say("nothing is restarted: not every role has served yet")]
        self._is_rolling = True
        self._to_restart = [role.name for role in workers if role.state is not RoleState.GIVEN_UP]
        return [Say("rolling restart of all workers"), *self._continue_restart(now)]

    def _continue_restart(self, now: float) -> list[Action]:
        """The next worker, once every other one serves."""
        if not self._is_rolling or self._num_stops:
            return []
        settled = (RoleState.READY, RoleState.GIVEN_UP)
        if any(role.state not in settled for role in self._roles.values()):
            return []
        while self._to_restart:
            role = self._roles[self._to_restart.pop(0)]
            if role.state is RoleState.READY:
                return [self._leave(role, now)]
        self._is_rolling = False
        return [Say("rolling restart done")]

    def _on_shift(self, name: str, kind: str, now: float) -> list[Action]:
        role = self._roles.get(name)
        if self._num_stops or role is None or role.kind == kind or "router" in (role.kind, kind):
            return []
        settled = (RoleState.READY, RoleState.GIVEN_UP)
        if self._is_rolling or any(known.state not in settled for known in self._roles.values()):
            return [Say(f"{name} stays a {role.kind} worker: not everybody serves")]
        ready = [known for known in self._roles.values() if known.state is RoleState.READY]
        if role not in ready:
            return [Say(f"{name} stays a {role.kind} worker: it is given up")]
        if kind != "decode" and not self._is_spared(role):
            return [Say(f"{name} stays a decode worker: it is the last")]
        role.state, role.deadline = RoleState.SHIFTING, now + PREPARE_S
        text = f"{name} becomes a {kind} worker: it drains and is started as epoch {role.epoch + 1}"
        return [Say(text), self._become(role, kind)]

    def _on_prepared(self, role: _Role, cause: str, now: float) -> list[Action]:
        """Its next process is up, or `cause`; or it has waited long enough for that."""
        if not cause and role.kind != "decode" and not self._is_spared(role):
            cause = "it is the last decode worker now"
        if cause:
            failed, remain = role.kind, self._remain(role)
            return [Say(f"{role.name} cannot become a {failed} worker: {cause}"), remain]
        return [self._leave(role, now)]

    def _is_spared(self, role: _Role) -> bool:
        """Another worker decodes."""
        others = (known for known in self._roles.values() if known is not role)
        return any(known.kind == "decode" and known.state is RoleState.READY for known in others)

    def _remain(self, role: _Role) -> Remain:
        """A shift that had not begun to drain is off."""
        assert role.kind_before is not None, "it is not to become anything"
        role.kind, role.kind_before = role.kind_before, None
        role.state, role.deadline = RoleState.READY, None
        return Remain(role.name, role.kind)

    def _leave(self, role: _Role, now: float) -> Drain:
        role.state, role.deadline = RoleState.RESTARTING, now + self.drain_grace_s + STOP_MARGIN_S
        return Drain(role.name, role.epoch)

    def _become(self, role: _Role, kind: str) -> Become:
        role.kind_before, role.kind = role.kind, kind
        return Become(role.name, kind)

    def _on_stop(self, now: float) -> list[Action]:
        self._num_stops += 1
        if self._num_stops > 1:
            return [*self._kill_all(), self._finish(FORCED_EXIT_CODE, "stopped at once, requests were cut")]
        actions: list[Action] = []
        for role in self._roles.values():
            if role.state is RoleState.WAITING:
                role.state, role.deadline = RoleState.STOPPED, None
            elif role.state is RoleState.SHIFTING:
                actions.append(self._remain(role))
        return [*actions, *self._continue_stop(now)]

    def _on_tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for role in self._roles.values():
            if self._finished or role.deadline is None or role.deadline > now:
                continue
            if role.state is RoleState.WAITING:
                actions.append(self._start(role, now))
            elif role.state is RoleState.SHIFTING:
                actions += self._on_prepared(role, "", now)
            elif role.state is RoleState.STOPPING:
                role.state, role.deadline = RoleState.STOPPED, None
                actions += [Say(f"{role.name} did not stop in time: killed"), Kill(role.name, role.epoch)]
            elif role.state is RoleState.RESTARTING:
                actions += [Say(f"{role.name} did not drain in time: killed"), Kill(role.name, role.epoch)]
                actions.append(self._start_next(role, now))
            else:
                actions.append(Kill(role.name, role.epoch))
                actions += self._fail(role, f"not ready after {self.start_timeout_s:g} s", now)
        return actions + (self._continue_stop(now) if self._num_stops and not self._finished else [])

    def _start(self, role: _Role, now: float) -> Start:
        role.state, role.deadline, role.ready_at = RoleState.STARTING, now + self.start_timeout_s, None
        return Start(role.name, role.epoch)

    def _start_next(self, role: _Role, now: float) -> Start:
        role.epoch += 1
        return self._start(role, now)

    def _fail(self, role: _Role, cause: str, now: float) -> list[Action]:
        """A role ended that should not have."""
        if self._num_stops:
            role.state, role.deadline = RoleState.STOPPED, None
            return [Say(f"{role.name} ended while stopping: {cause}"), *self._continue_stop(now)]
        if not role.was_ready:
            role.state = RoleState.STOPPED
            return [*self._kill_all(), self._finish(1, f"{role.name} did not start: {cause}")]
        if role.kind_before is not None:
            failed, text = role.kind, f"is a {role.kind_before} worker again: {cause}"
            become = self._become(role, role.kind_before)
            actions: list[Action] = [Say(f"{role.name} cannot be a {failed} worker, and {text}"), become]
            role.kind_before = None
            return [*actions, self._start_next(role, now)]
        if role.ready_at is not None and now - role.ready_at >= HEALTHY_S:
            role.num_failures = 0
        role.num_failures += 1
        if role.num_failures > MAX_RESTARTS:
            role.state, role.deadline = RoleState.GIVEN_UP, None
            text = f"{role.name} died {role.num_failures} times in a row and is given up: {cause}"
            if self._can_serve():
                return [Say(text), *self._continue_restart(now)]
            return [*self._kill_all(), self._finish(1, text)]
        backoff_s = 0.0 if role.num_failures == 1 else min(MAX_BACKOFF_S, 0.5 * 2 ** (role.num_failures - 2))
        text = f"{role.name} died and is restarted as epoch {role.epoch + 1}: {cause}"
        if backoff_s == 0:
            return [Say(text), self._start_next(role, now)]
        role.epoch += 1
        role.state, role.deadline = RoleState.WAITING, now + backoff_s
        return [Say(f"{text} (in {backoff_s:g} s)")]

    def _can_serve(self) -> bool:
        alive = {role.kind for role in self._roles.values() if role.state is not RoleState.GIVEN_UP}
        return {"router", "decode"} <= alive

    def _continue_stop(self, now: float) -> list[Action]:
        """Drain what is next: the router, then all workers, then nothing is left."""
        running = [role for role in self._roles.values() if role.state in _RUNNING]
        if not running:
            return [self._finish(0, None)]
        routers = [role for role in running if role.kind == "router"]
        actions: list[Action] = []
        for role in routers or running:
            if role.state is not RoleState.STOPPING:
                limit_s = self.drain_grace_s + STOP_MARGIN_S if role.kind == "router" else WORKER_STOP_S
                role.state, role.deadline = RoleState.STOPPING, now + limit_s
                actions.append(Drain(role.name, role.epoch))
        return actions

    def _kill_all(self) -> list[Action]:
        running = [role for role in self._roles.values() if role.state in _RUNNING]
        for role in self._roles.values():
            role.deadline = None
            if role.state is not RoleState.GIVEN_UP:
                role.state = RoleState.STOPPED
        return [Kill(role.name, role.epoch) for role in running]

    def _finish(self, exit_code: int, error: str | None) -> Finish:
        self._finished = True
        return Finish(exit_code, error)
