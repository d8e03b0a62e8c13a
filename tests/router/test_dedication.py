"""Which workers only prefill or only decode, where mixed steps have a price."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from router.dedication import EVERY, Dedication, assigned
from router.planner import Kind, Roles, handoff_margin_s, predicted_rate, work_of

MODEL = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
TARGETS = Targets(0.5, 8e-3)
DEAR = Kind("dear", 4, msgspec.structs.replace(MODEL, mixed_s=5e-3), mixed_s=5e-3)
FREE = Kind("free", 4, MODEL)


def told(
    dedication: Dedication, count: int, num_running: float = 8.0, context: float = 10_000.0
) -> list[bool]:
    return [dedication.ended(2_000, 28, num_running, context) for _ in range(count)]


def test_workers_are_dedicated_where_a_split_serves_much_more() -> None:
    dedication = Dedication(DEAR, TARGETS)
    changes = told(dedication, EVERY)
    assert dedication.num_prefill == 3
    assert changes == [False] * (EVERY - 1) + [True]
    told(dedication, 10 * EVERY)
    assert dedication.num_prefill == 3


def test_all_do_both_where_nothing_is_to_be_won() -> None:
    for kind in (FREE, Kind("alone", 1, DEAR.model, DEAR.mixed_s)):
        dedication = Dedication(kind, TARGETS)
        assert not any(told(dedication, 4 * EVERY))
        assert dedication.num_prefill is None
    lenient = Dedication(DEAR, Targets(0.5, 50e-3))
    told(lenient, 4 * EVERY)
    assert lenient.num_prefill is None


def test_nothing_is_decided_by_the_first_answers_which_are_short() -> None:
    dedication = Dedication(DEAR, TARGETS)
    told(dedication, EVERY, num_running=EVERY)
    assert dedication.num_prefill is None
    told(dedication, 3 * EVERY, num_running=EVERY)
    assert dedication.num_prefill is not None


def test_one_more_decodes_when_rows_read_more_than_there_is_room_for() -> None:
    dedication = Dedication(DEAR, TARGETS)
    told(dedication, EVERY)
    seen = []
    for _ in range(4):
        told(dedication, 8, context=400_000.0)
        seen.append(dedication.num_prefill)
    assert seen == [2, 1, None, None]
    told(dedication, 2 * EVERY)
    assert dedication.num_prefill == 3


def test_all_do_both_again_when_answers_become_too_short_for_a_hand_off() -> None:
    dedication = Dedication(DEAR, TARGETS)
    told(dedication, EVERY)
    for _ in range(10 * EVERY):
        dedication.ended(2_000, 3, 8.0, 10_000.0)
    assert dedication.num_prefill is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_who_prefills_stays_and_the_emptiest_join(workers: list[tuple[int, bool]], wanted: int) -> None:
    rows, was = [float(one) for one, _ in workers], [flag for _, flag in workers]
    num_prefill = min(wanted, len(workers))
    now = assigned(num_prefill, rows, was)
    assert sum(now) == num_prefill
    if sum(was) >= num_prefill:
        assert all(before for before, after in zip(was, now, strict=True) if after)
    else:
        assert all(after for before, after in zip(was, now, strict=True) if before)
        joined = [rows[i] for i, after in enumerate(now) if after and not was[i]]
        assert max(joined) <= min((rows[i] for i, after in enumerate(now) if not after), default=math.inf)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.floats(6e-3, 50e-3))
def test_steps_shorter_by_the_margin_leave_few_answers_behind(answers: list[int], tpot_s: float) -> None:
    step_s = MODEL.fixed_s + MODEL.floor_s
    margin_s = handoff_margin_s(answers, MODEL, tpot_s)

    def missing(margin_s: float) -> float:
        late = 0.0
        for answer in answers:
            if answer > 1:  # begins 2 ms and a part of a step late
                late += 1 - min(1.0, max(0.0, (margin_s * (answer - 1) - 2e-3) / step_s))
        return late / len(answers)

    if math.isinf(margin_s):
        assert missing(tpot_s - step_s) > 0.07
    else:
        assert missing(margin_s) <= 0.07
        assert margin_s < 1e-8 or missing(margin_s * 0.99) >= missing(margin_s)


def test_answers_too_short_for_a_hand_off_leave_prefill_workers_idle() -> None:
    works = work_of([(1_000, 4)] * 50, [DEAR], TARGETS)
    assert math.isinf(works[0].margin_s)
    assert predicted_rate([DEAR], [Roles(2, 2, 0)], works, TARGETS) < 1e-6
    half = predicted_rate([DEAR], [Roles(2, 0, 2)], works, TARGETS)
    everybody = predicted_rate([DEAR], [Roles(0, 0, 4)], works, TARGETS)
    assert 0 < half < 0.51 * everybody


def test_where_no_gap_has_room_for_a_mixed_step_half_prefill_from_the_beginning() -> None:
    for targets in (Targets(0.5, 20e-3, 15e-3), Targets(0.03, 20e-3)):
        dedication = Dedication(DEAR, targets)
        assert dedication.num_prefill == 2
        for _ in range(40):
            told(dedication, 8, context=1e9)
        assert dedication.num_prefill == 1  # never all: rows and prompts would meet
    assert Dedication(DEAR, Targets(0.5, 20e-3, 16e-3)).num_prefill is None
    assert Dedication(FREE, Targets(0.5, 20e-3, 7e-3)).num_prefill is None


def test_a_hand_off_needs_two_steps_within_a_gap() -> None:
    work = [(1_000, 200)] * 50
    rates = [
        predicted_rate([DEAR], [Roles(2, 2, 0)], work_of(work, [DEAR], targets), targets)
        for targets in (Targets(0.5, 20e-3), Targets(0.5, 20e-3, 20e-3), Targets(0.5, 20e-3, 13e-3))
    ]
    assert rates[0] > rates[1] > rates[2]
    assert rates[2] < 1e-6
