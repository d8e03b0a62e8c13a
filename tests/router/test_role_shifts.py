"""Which worker changes its role, and when: the loop around the planner, on a clock of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest
from cluster.ids import WorkerId
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.messages import Role
from router.planner import Kind, best_roles
from router.role_shifts import Member, Question, RoleShifts, Shift, ShiftSettings

H100 = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
H20 = StepModel(0.9e-3, 4.2e-3, 128e-6, 39.2e-9, 7.0e-9)
TARGETS = Targets(0.5, 0.025)
OUTPUT_HEAVY, PROMPT_HEAVY = (200, 800), (8000, 20)
SETTINGS = ShiftSettings()
answer_of = functools.cache(Question.answer)  # all that it depends on is in the question


@dataclass
class World:
    """A cluster whose launcher does at once what it is asked for; `away_s` until a worker is back."""

    members: list[Member]
    request: tuple[int, int] = OUTPUT_HEAVY
    away_s: float = 20.0
    now: float = 0.0
    done: list[tuple[float, Shift]] = field(default_factory=list)
    targets: Targets = TARGETS

    def __post_init__(self) -> None:
        self.shifts = RoleShifts(self.targets, len(self.members))
        self._back: tuple[float, Shift] | None = None

    def run(self, seconds: float) -> None:
        """Questions at their interval, some answers between two."""
        until = self.now + seconds
        while self.now < until:
            for _ in range(20):
                self.shifts.answered(*self.request, self.now)
            self.now += SETTINGS.interval_s
            self._come_back()
            question = self.shifts.question(self.members, self.now)
            if question is None:
                continue
            shift = self.shifts.take(answer_of(question), self.members, self.now)
            if shift is not None:
                self.begin(shift)

    def begin(self, shift: Shift) -> None:
        self.done.append((self.now, shift))
        self._back = self.now + self.away_s, shift
        self.members = [one for one in self.members if one.worker != shift.worker]

    def _come_back(self) -> None:
        if self._back is not None and self.now >= self._back[0]:
            shift = self._back[1]
            self.members.append(Member(shift.worker, shift.role, H100, is_ready=True))
            self._back = None

    def num(self, role: Role) -> int:
        return sum(one.role is role for one in self.members)


def members(num_prefill: int, num_decode: int, model: StepModel | None = H100) -> list[Member]:
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    return [
        Member(WorkerId(f"worker-{at}"), role, model, is_ready=True, num_sequences=at % 3)
        for at, role in enumerate(roles)
    ]


def test_workers_come_to_decode_one_after_the_other_when_answers_are_long() -> None:
    world = World(members(3, 1))
    world.run(600.0)
    assert world.num(Role.DECODE) >= 3
    (first_at, first), *later = world.done
    assert (first.worker, first.role) == ("worker-0", Role.DECODE), "of those with the fewest sequences"
    assert "predicted to serve" in first.why
    assert first_at >= SETTINGS.planner.patience * SETTINGS.interval_s
    times = [at for at, _ in world.done]
    pauses = [after - before for before, after in pairwise(times)]
    assert later
    assert min(pauses) >= world.away_s + SETTINGS.rest_s + SETTINGS.interval_s


def test_a_load_that_changes_its_mind_moves_nobody() -> None:
    """Fewer decisions in a row than `patience`: the window of answers never settles on either."""
    world = World(members(1, 1))
    world.run(900.0)
    assert len(world.done) <= 1, "one prefill worker may come to do both; nobody goes back and forth"
    before = list(world.done)
    for request in (PROMPT_HEAVY, OUTPUT_HEAVY) * 5:
        world.request = request
        world.run(20.0)
    assert world.done == before


def test_one_prefill_and_one_decode_worker_never_end_without_one_that_decodes() -> None:
    for request in (OUTPUT_HEAVY, PROMPT_HEAVY):
        world = World(members(1, 1), request)
        world.run(1200.0)
        assert world.num(Role.DECODE) >= 1
        assert all(shift.role is Role.DECODE for _, shift in world.done)


def test_unequal_workers_each_get_what_they_are_comparatively_good_at() -> None:
    """Prompts go to the fast ones: a slow one that only prefills comes to decode first of all."""
    slow = [replace(one, worker=WorkerId(f"slow-{one.worker}"), model=H20) for one in members(2, 0)]
    world = World([*members(0, 2), *slow], (1000, 250), targets=Targets(0.5, 0.015))
    for _ in range(SETTINGS.least_answers):
        world.shifts.answered(1000, 250, 1.0)
    question = world.shifts.question(world.members, 2.0)
    assert question is not None
    assert [(kind.count, kind.model) for kind in question.kinds] == [(2, H100), (2, H20)]
    world.run(60.0)
    assert world.done[0][1].worker.startswith("slow")
    assert world.done[0][1].role is Role.DECODE


@pytest.mark.parametrize("how", ["few", "old", "missing", "not ready", "no model", "impossible"])
def test_nothing_is_asked_while_too_little_is_known(how: str) -> None:
    world = World(members(3, 1))
    if how == "missing":
        world.shifts.num_workers = 5
    elif how == "not ready":
        world.members[0] = replace(world.members[0], is_ready=False)
    elif how == "no model":
        world.members[0] = replace(world.members[0], model=None)
    elif how == "impossible":
        world.shifts.targets = Targets(0.3, 0.004)
    if how in ("few", "old"):
        num = SETTINGS.least_answers - (how == "few")
        for _ in range(num):
            world.shifts.answered(*OUTPUT_HEAVY, 0.0)
        at = SETTINGS.window_s + 1 if how == "old" else 1.0
        assert world.shifts.question(world.members, at) is None
        return
    world.run(300.0)
    assert world.done == []


def test_a_worker_that_does_not_come_back_is_given_up_after_a_while() -> None:
    world = World(members(3, 1), away_s=1e9)
    world.run(200.0)
    ((_, shift),) = world.done
    assert world.shifts.under_way == shift
    world.run(SETTINGS.give_up_s)
    assert world.shifts.under_way is None
    assert len(world.done) == 1, "a worker is missing: nobody else goes"


@pytest.mark.parametrize("how", ["stays", "comes back as it was"])
def test_a_worker_that_does_not_get_its_role_is_left_alone_longer_each_time(how: str) -> None:
    world = World(members(3, 1))
    asked: list[float] = []

    def refuse(shift: Shift) -> None:
        asked.append(world.now)
        if how == "comes back as it was":
            world.members = [
                replace(one, epoch=one.epoch + 1) if one.worker == shift.worker else one
                for one in world.members
            ]

    world.begin = refuse  # type: ignore[method-assign]
    world.run(1200.0)
    assert len(asked) >= 3, "others are asked for, and this one again"
    for one, other in pairwise(asked):
        assert other - one >= SETTINGS.rest_s
    assert world.num(Role.PREFILL) == 3
    few = len([at for at in asked if at < asked[0] + SETTINGS.retry_s])
    assert few <= 3, "each of the three at most once before any is tried again"
    world.run(7200.0)
    late = [at for at in asked if at > world.now - 2400.0]
    assert len(late) <= 3, "the pauses have grown"


def test_by_hand_one_at_a_time_and_never_the_last_decode_worker() -> None:
    world = World(members(1, 2))
    shifts, first, last = world.shifts, WorkerId("worker-1"), WorkerId("worker-2")
    for worker, role, says in (
        (WorkerId("nobody"), Role.DECODE, "no worker `nobody`"),
        (first, Role.DECODE, "already"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            shifts.ask(worker, role, world.members, 0.0)
    world.begin(shifts.ask(first, Role.PREFILL, world.members, 0.0))
    with pytest.raises(InvalidRequest, match="`worker-1` is about to become a prefill worker"):
        shifts.ask(last, Role.PREFILL, world.members, 1.0)
    world.away_s = 0.0
    world.members.append(Member(first, Role.PREFILL, H100, is_ready=True))
    with pytest.raises(InvalidRequest, match="the last decode worker"):
        shifts.ask(last, Role.PREFILL, world.members, 2.0)
    assert shifts.ask(first, Role.DECODE, world.members, 3.0).role is Role.DECODE


MODELS = st.builds(
    StepModel,
    st.floats(1e-4, 5e-3),
    st.floats(1e-3, 3e-2),
    st.floats(1e-6, 1e-3),
    st.floats(1e-9, 1e-6),
    st.floats(1e-10, 1e-7),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(MODELS, st.sampled_from(Role)), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(1, 2000)), min_size=1, max_size=8),
    st.floats(0.05, 5.0),
    st.floats(0.005, 0.2),
)
def test_whatever_the_pool_a_worker_that_decodes_stays_and_no_step_serves_less(
    pool: list[tuple[StepModel, Role]], requests: list[tuple[int, int]], ttft_s: float, tpot_s: float
) -> None:
    found = [
        Member(WorkerId(f"worker-{at}"), role, model, is_ready=True) for at, (model, role) in enumerate(pool)
    ]
    shifts = RoleShifts(Targets(ttft_s, tpot_s), len(found))
    now = 0.0
    for at in range(SETTINGS.least_answers):
        shifts.answered(*requests[at % len(requests)], now)
    for _ in range(SETTINGS.planner.patience):
        now += SETTINGS.interval_s
        question = shifts.question(found, now)
        assert question is not None
        shift = shifts.take(question.answer(), found, now)
        if shift is not None:
            after = [replace(one, role=shift.role) if one.worker == shift.worker else one for one in found]
            assert sum(one.role is Role.DECODE for one in after) >= 1
            assert shift.role is Role.DECODE or sum(one.role is Role.DECODE for one in found) >= 2


@settings(max_examples=100, deadline=None)
@given(MODELS, st.integers(1, 6), st.integers(1, 8000), st.integers(1, 1000), st.floats(0.006, 0.1))
def test_without_a_price_of_mixed_steps_nobody_only_decodes(
    model: StepModel, count: int, num_prompt: int, num_output: int, tpot_s: float
) -> None:
    """Why the live search may leave such splits out."""
    kinds, requests, targets = [Kind("one", count, model)], [(num_prompt, num_output)], Targets(1.0, tpot_s)
    best, _ = best_roles(kinds, requests, targets)
    narrow, _ = best_roles(kinds, requests, targets, may_only_decode=False)
    assert narrow.rate >= best.rate * (1 - 1e-6)
