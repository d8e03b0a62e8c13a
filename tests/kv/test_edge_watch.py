"""The watchdog: late exactly when a deadline of something still waited for has passed, and once."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from cluster.kv.edge_watch import Deadlines, EdgeWatch

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 50)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("look"), st.integers(0, 20)),  # so much later
    ),
    max_size=60,
)


@given(STEPS)
def test_late_is_when_the_first_open_deadline_has_passed_and_only_once(steps: list[tuple[str, int]]) -> None:
    deadlines, waits, now, is_over = Deadlines(), [], 0.0, False
    for do, value in steps:
        if do == "begin":
            waits.append((deadlines.begin(now + value), now + value))
        elif do == "end" and waits:
            deadlines.end(waits.pop(value % len(waits))[0])
        elif do == "look":
            now += value
            expected = not is_over and any(deadline <= now for _, deadline in waits)
            assert deadlines.is_late(now) is expected
            is_over = is_over or expected
        first = min((deadline for _, deadline in waits), default=None)
        assert deadlines.next_s() == (None if is_over else first)
        assert deadlines.is_over is is_over


def test_a_deadline_that_passes_ends_the_edge_once_and_an_earlier_end_does_not() -> None:
    calls, late = [], threading.Event()

    def on_late() -> None:
        calls.append(threading.current_thread().name)
        late.set()

    watch = EdgeWatch("kv-edge e", on_late)
    with watch.guard(time.monotonic() + 1000):
        pass
    assert calls == []
    with watch.guard(time.monotonic() + 1000), watch.guard(time.monotonic()):
        assert late.wait(20)  # the sooner one counts, though the thread slept until the later
    with watch.guard(time.monotonic()):
        pass
    watch.close()
    assert calls == ["kv-edge e watch"]


def num_threads() -> int:
    """Of watches: others may end at any moment."""
    return sum(thread.name == "kv-edge e watch" for thread in threading.enumerate())


def test_closing_ends_the_thread_and_nothing_starts_it_again() -> None:
    watch = EdgeWatch("kv-edge e", lambda: None)
    assert num_threads() == 0
    with watch.guard(time.monotonic() + 1000):
        assert num_threads() == 1
        watch.close()
        assert num_threads() == 0
    watch.close()
    with watch.guard(time.monotonic() - 1):
        assert num_threads() == 0
