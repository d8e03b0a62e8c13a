"""Which worker should have another role, and when: `router.planner` applied to a cluster that serves. Pure.

1. `answered`: every answer says how long prompts and answers are; those of the last minutes count.
2. Every `interval_s` the live part (`router.role_watch`) asks `question`; None while nothing may change: a
   shift is under way or just over, a worker is missing or has no step model yet, too few answers are known.
3. `Question.answer` searches the roles that would serve most. It takes milliseconds, tens of them for a pool
   of several kinds, and touches nothing else: it may run on a thread.
4. `take` gives the shift to ask for. It comes only after `planner.patience` answers in a row with the same
   roles, each predicted to serve more by `planner.gain`.

Algorithm: workers are of one kind if their prompt speeds differ by at most `ALIKE`. A decode worker does
both, so the search leaves out decode-only ones: the planner is told no price of mixed steps here, and without
one they never serve more. Of all single steps towards the roles found, the one that serves most is taken; of
its kind, the worker with the fewest sequences. None if even that would serve less: a valley is not crossed.

Order: workers become decode workers before others become prefill workers.

Bounds: never the last decode worker. One shift at a time, then `rest_s` without any. A worker that the
launcher let stay, or that came back as it was, is left alone for `retry_s`, then twice as long, and so on;
not by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.errors import InvalidRequest
from cluster.ids import WorkerId
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.messages import Role
from router.planner import Kind, Planner, PlannerState, Roles, predicted_rate, work_of

ALIKE = 2.0  # times as slow: models fitted on a busy machine differ by half


@dataclass(frozen=True, slots=True)
class ShiftSettings:
    interval_s: float = 10.0  # between two questions
    rest_s: float = 60.0  # after a shift: the worker's cache fills, its step model is fitted
    give_up_s: float = 300.0  # on a worker that does not come back in its new role
    unheeded_s: float = 60.0  # a worker that still serves as before has not been touched
    retry_s: float = 300.0
    most_doublings: int = 6
    window_s: float = 300.0
    least_answers: int = 64
    most_answers: int = 512
    planner: Planner = Planner(gain=0.1, patience=3, may_only_decode=False)  # noqa: RUF009 -- frozen


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it is now. `model` None: its steps are not known yet."""

    worker: WorkerId
    role: Role
    model: StepModel | None
    is_ready: bool
    num_sequences: int = 0
    epoch: int = 1


@dataclass(slots=True)
class _Setback:
    """Of a worker that did not get a role."""

    num: int = 0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    worker: WorkerId
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    state: PlannerState
    shift: Shift | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """All that the answer depends on. `kinds` and `members` go together."""

    planner: Planner
    state: PlannerState
    kinds: tuple[Kind, ...]
    members: tuple[tuple[Member, ...], ...]
    requests: tuple[tuple[int, int], ...]
    targets: Targets

    def answer(self) -> Answer:
        state = self.planner.decide(self.state, self.kinds, self.requests, self.targets)
        if state.roles == self.state.roles:
            return Answer(state)
        return Answer(PlannerState(self.state.roles), self._step_to(state.roles))

    def _step_to(self, wanted: tuple[Roles, ...]) -> Shift | None:
        works = work_of(self.requests, self.kinds, self.targets)
        present = self.state.roles

        def rate(roles: tuple[Roles, ...]) -> float:
            return predicted_rate(self.kinds, roles, works, self.targets)

        for role in (Role.DECODE, Role.PREFILL):
            steps = [
                (rate(_moved(present, at, role)), -at)
                for at, (now, then) in enumerate(zip(present, wanted, strict=True))
                if (
                    then.num_prefill < now.num_prefill
                    if role is Role.DECODE
                    else then.num_prefill > now.num_prefill
                )
            ]
            if steps:
                best, at = max(steps)
                now = rate(present)
                able = [one for one in self.members[-at] if one.role is not role]
                if best < now or not able:
                    return None
                worker = min(able, key=lambda one: one.num_sequences).worker
                text = f"predicted to serve {best:.3g} requests/s instead of {now:.3g}"
                return Shift(worker, role, text)
        return None


@dataclass(slots=True)
class RoleShifts:
    """Owns what is known of recent answers, and the shift under way."""

    targets: Targets
    num_workers: int  # that the cluster has when nobody is missing
    settings: ShiftSettings = field(default_factory=ShiftSettings)
    under_way: Shift | None = None
    _asked_at: float = 0.0
    _asked_epoch: int = 0  # of the worker then
    _setbacks: dict[tuple[WorkerId, Role], _Setback] = field(default_factory=dict)
    _rests_until: float = 0.0
    _state: PlannerState | None = None
    _answers: deque[tuple[float, int, int]] = field(default_factory=deque)

    def answered(self, num_prompt: int, num_output: int, now: float) -> None:
        """An answer is complete; `num_prompt` without what was cached."""
        self._answers.append((now, num_prompt, num_output))
        if len(self._answers) > self.settings.most_answers:
            self._answers.popleft()

    def question(self, members: Sequence[Member], now: float) -> Question | None:
        """See the module."""
        self.look(members, now)
        while self._answers and self._answers[0][0] < now - self.settings.window_s:
            self._answers.popleft()
        may_change = (
            self.under_way is None
            and now >= self._rests_until
            and len(self._answers) >= self.settings.least_answers
            and len(members) >= self.num_workers
            and all(member.is_ready and member.model is not None for member in members)
        )
        if not may_change:
            self._state = None
            return None
        kinds, groups = _kinds_of(members)
        roles = tuple(_roles_of(group) for group in groups)
        if self._state is None or self._state.roles != roles:
            self._state = PlannerState(roles)
        requests = tuple((max(1, prompt), max(1, output)) for _, prompt, output in self._answers)
        return Question(self.settings.planner, self._state, kinds, groups, requests, self.targets)

    def take(self, answer: Answer, members: Sequence[Member], now: float) -> Shift | None:
        """The shift to ask for now. `members` as they are by now."""
        self._state = answer.state
        shift = answer.shift
        if shift is None or self._refusal(shift.worker, shift.role, members) is not None:
            return None
        setback = self._setbacks.get((shift.worker, shift.role))
        if setback is not None and now < setback.until:
            return None
        return self._begin(shift, members, now)

    def ask(self, worker: WorkerId, role: Role, members: Sequence[Member], now: float) -> Shift:
        """A person wants it.

        Raises:
            InvalidRequest: it cannot be done, or not now.
        """
        self.look(members, now)
        refusal = self._refusal(worker, role, members)
        if refusal is not None:
            raise InvalidRequest(refusal)
        return self._begin(Shift(worker, role, "asked for by hand"), members, now)

    # ---- parts

    def _begin(self, shift: Shift, members: Iterable[Member], now: float) -> Shift:
        self.under_way, self._asked_at, self._state = shift, now, None
        self._asked_epoch = max((one.epoch for one in members if one.worker == shift.worker), default=0)
        return shift

    def look(self, members: Iterable[Member], now: float) -> None:
        """Is the shift under way over?"""
        shift = self.under_way
        if shift is None:
            return
        found = next((one for one in members if one.worker == shift.worker and one.is_ready), None)
        if found is not None and found.role is shift.role:
            self._setbacks.pop((shift.worker, shift.role), None)
        else:
            is_back = found is not None and found.epoch > self._asked_epoch
            patience_s = self.settings.give_up_s if found is None else self.settings.unheeded_s
            if not is_back and now < self._asked_at + patience_s:
                return
            setback = self._setbacks.setdefault((shift.worker, shift.role), _Setback())
            setback.until = now + self.settings.retry_s * 2**setback.num
            setback.num = min(setback.num + 1, self.settings.most_doublings)
        self.under_way, self._rests_until = None, now + self.settings.rest_s

    def _refusal(self, worker: WorkerId, role: Role, members: Sequence[Member]) -> str | None:
        """Why this worker cannot get this role now, one sentence."""
        found = next((one for one in members if one.worker == worker), None)
        if found is None:
            return f"There is no worker `{worker}` here."
        if found.role is role:
            return f"`{worker}` is a {role.value} worker already."
        if self.under_way is not None:
            return f"`{self.under_way.worker}` is about to become a {self.under_way.role.value} worker."
        if len(members) < self.num_workers or not all(one.is_ready for one in members):
            return "Not every worker is ready: roles change only while all are."
        if role is Role.PREFILL and not any(one.role is Role.DECODE for one in members if one is not found):
            return f"`{worker}` is the last decode worker."
        return None


def _kinds_of(members: Sequence[Member]) -> tuple[tuple[Kind, ...], tuple[tuple[Member, ...], ...]]:
    """Fastest first. A kind's model is that of its worker in the middle."""
    models = sorted(
        ((one.model, one) for one in members if one.model is not None),
        key=lambda pair: (pair[0].per_token_s, pair[1].worker),
    )
    groups: list[list[tuple[StepModel, Member]]] = []
    for pair in models:
        if groups and pair[0].per_token_s <= ALIKE * groups[-1][0][0].per_token_s:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    kinds = tuple(
        Kind(f"kind-{at}", len(group), group[len(group) // 2][0]) for at, group in enumerate(groups)
    )
    return kinds, tuple(tuple(member for _, member in group) for group in groups)


def _roles_of(group: Sequence[Member]) -> Roles:
    num_prefill = sum(one.role is Role.PREFILL for one in group)
    return Roles(num_prefill, 0, len(group) - num_prefill)


def _moved(roles: tuple[Roles, ...], at: int, role: Role) -> tuple[Roles, ...]:
    """One worker of a kind in another role."""
    change = 1 if role is Role.PREFILL else -1
    one = roles[at]
    moved = replace(one, num_prefill=one.num_prefill + change, num_both=one.num_both - change)
    return (*roles[:at], moved, *roles[at + 1 :])
