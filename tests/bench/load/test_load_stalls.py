import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.stalls import LOOK_S, MAX_STALLS, MIN_STALL_S, Stalls, StallWatch


def test_only_what_is_long_enough_is_a_stall_but_the_longest_is_known() -> None:
    stalls = Stalls()
    stalls.note(1.0, 1.0 + 0.8 * MIN_STALL_S)
    assert stalls.in_order() == []
    assert 0.0 < stalls.max_s < MIN_STALL_S
    stalls.note(3.0, 3.5)
    stalls.note(2.0, 2.25)
    stalls.note(5.0, 4.0)  # a timer that rang early
    assert stalls.in_order() == [(2.0, 2.25), (3.0, 3.5)]
    assert stalls.max_s == 0.5


def test_of_many_the_longest_are_kept() -> None:
    stalls = Stalls()
    for number in range(MAX_STALLS + 50):
        stalls.note(float(number), number + (0.25 if number < 50 else 0.5))
    kept = stalls.in_order()
    assert len(kept) == MAX_STALLS
    assert kept[0] == (50.0, 50.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10))))
def test_stalls_are_in_order_and_have_a_length(looks: list[tuple[float, float]]) -> None:
    stalls = Stalls()
    for due_s, late_s in looks:
        stalls.note(due_s, due_s + late_s)
    kept = stalls.in_order()
    assert kept == sorted(kept)
    assert all(start_s < end_s for start_s, end_s in kept)


async def test_a_loop_that_stood_still_is_seen() -> None:
    start_ns = time.perf_counter_ns()
    watch = StallWatch(asyncio.get_running_loop(), start_ns)
    await asyncio.sleep(0.03)
    before_s = (time.perf_counter_ns() - start_ns) / 1e9
    time.sleep(0.1)
    after_s = (time.perf_counter_ns() - start_ns) / 1e9
    await asyncio.sleep(0.03)
    watch.close()
    longest = max(watch.stalls.in_order(), key=lambda stall: stall[1] - stall[0])
    assert watch.stalls.max_s == pytest.approx(longest[1] - longest[0])
    assert longest[1] - longest[0] >= 0.1 - LOOK_S - 0.002  # seen from the moment the look was due
    assert any(
        start_s <= before_s + LOOK_S + 0.002 and after_s <= end_s
        for start_s, end_s in watch.stalls.in_order()
    )


async def test_a_stall_that_lasts_until_the_end_is_seen() -> None:
    watch = StallWatch(asyncio.get_running_loop(), time.perf_counter_ns())
    time.sleep(0.05)
    watch.close()
    assert watch.stalls.max_s >= 0.03
