"""When a worker that says nothing is given up."""

from __future__ import annotations

import math

from router.silence import SECOND_LOOK_S, judge

LIMIT_S = 2.0


def test_who_spoke_is_looked_at_when_its_time_would_be_over() -> None:
    verdict = judge(0.5, 0.0, LIMIT_S, is_suspected=True)
    assert (verdict.look_in_s, verdict.is_suspected) == (1.5, False)


def test_who_is_silent_gets_one_more_look_and_is_then_hung() -> None:
    first = judge(LIMIT_S, 0.0, LIMIT_S, is_suspected=False)
    assert (first.look_in_s, first.is_suspected) == (SECOND_LOOK_S, True)
    assert judge(LIMIT_S + SECOND_LOOK_S, SECOND_LOOK_S, LIMIT_S, is_suspected=True).look_in_s is None


def test_a_router_that_slept_looks_again_before_it_gives_anyone_up() -> None:
    late_s = math.nextafter(SECOND_LOOK_S, 1.0)
    verdict = judge(60.0, late_s, LIMIT_S, is_suspected=True)
    assert (verdict.look_in_s, verdict.is_suspected) == (SECOND_LOOK_S, True)
