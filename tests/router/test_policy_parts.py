"""What admission stands on: deadlines, the queue, leases."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import LeaseId, RequestId, WorkerId
from router.admission import MAX_SCAN, AdmissionQueue
from router.deadlines import Deadlines
from router.leases import LeaseKeeper

D0 = WorkerId("d0")


# ---- deadlines


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["set", "drop", "pop"]), st.integers(0, 8), st.integers(0, 50)),
        max_size=200,
    )
)
def test_deadlines_against_a_plain_dict(moves: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for move, key, at in moves:
        if move == "set":
            deadlines.set(key, at)
            model[key] = at
        elif move == "drop":
            deadlines.drop(key)
            model.pop(key, None)
        else:
            due = deadlines.pop_due(at)
            assert sorted(due) == sorted(key for key, value in model.items() if value <= at)
            assert [model[key] for key in due] == sorted(model[key] for key in due)
            for key in due:
                del model[key]
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
        assert {key: deadlines.get(key) for key in model} == model


def test_deadlines_keep_no_leftovers() -> None:
    deadlines: Deadlines[int] = Deadlines()
    rng = random.Random(1)
    for _ in range(10_000):
        deadlines.set(rng.randrange(10), rng.random())
    assert len(deadlines._heap) <= 2 * 10 + 64
    for key in range(10):
        deadlines.drop(key)
    assert deadlines._heap == []


# ---- admission


def test_queue_orders_by_arrival_and_lets_leave() -> None:
    queue = AdmissionQueue(max_queued=3, max_overtake_s=5.0)
    queue.add(RequestId("c"), 3, 0.0)
    queue.add(RequestId("a"), 1, 1.0)  # retried: it arrived first
    queue.add(RequestId("b"), 2, 1.0)
    assert queue.is_full
    assert queue.candidates() == ["a", "b", "c"]
    queue.remove(RequestId("b"))
    queue.remove(RequestId("b"))
    assert queue.candidates() == ["a", "c"]
    assert RequestId("b") not in queue
    assert not queue.is_full


def test_nobody_passes_an_overdue_head() -> None:
    queue = AdmissionQueue(max_queued=3, max_overtake_s=5.0)
    assert queue.may_pass(0.0)
    queue.add(RequestId("a"), 1, 10.0)
    assert queue.may_pass(14.9)
    assert not queue.may_pass(15.0)
    assert queue.is_overdue(RequestId("a"), 15.0)


def test_few_are_tried_at_a_time() -> None:
    queue = AdmissionQueue(max_queued=1000, max_overtake_s=5.0)
    for i in range(500):
        queue.add(RequestId(f"r{i}"), i, 0.0)
    assert len(queue.candidates()) == MAX_SCAN


def test_retry_after_is_the_queue_over_the_rate() -> None:
    queue = AdmissionQueue(max_queued=1000, max_overtake_s=5.0)
    assert queue.retry_after_s(0.0) == 1.0  # nothing known
    for i in range(10):
        queue.departed(float(i))  # one a second
    for i in range(19):
        queue.add(RequestId(f"r{i}"), i, 9.0)
    assert queue.retry_after_s(10.0) == 20.0
    assert queue.retry_after_s(10_000.0) == 60.0  # nothing moves: bounded


def test_the_wait_is_expected_from_the_rate_since_somebody_waits() -> None:
    queue = AdmissionQueue(max_queued=1000, max_overtake_s=5.0)
    for i in range(20):
        queue.departed(float(i))
    assert queue.expected_wait_s(3600.0) is None  # nobody waits; an hour without requests says nothing
    for i in range(9):
        queue.add(RequestId(f"r{i}"), i, 3600.0)
    for i in range(7):
        queue.departed(3601.0 + i)
        assert queue.expected_wait_s(3601.0 + i) is None
    queue.departed(3608.0)
    assert queue.expected_wait_s(3608.0) == 10.0  # ten of them, one a second
    for i in range(9):
        queue.remove(RequestId(f"r{i}"))
    assert queue.expected_wait_s(3608.0) is None
    queue.add(RequestId("next"), 99, 3610.0)
    assert queue.expected_wait_s(3620.0) is None  # another time, another rate


# ---- leases


def test_leases_are_renewed_together_at_a_third() -> None:
    keeper = LeaseKeeper()
    keeper.add(D0, LeaseId(1), 9.0, 0.0)
    keeper.add(D0, LeaseId(2), 9.0, 1.0)
    assert keeper.next_renewal() == 3.0
    assert keeper.pop_due(2.9) == []
    assert keeper.pop_due(3.0) == [(D0, [LeaseId(1), LeaseId(2)])]
    assert keeper.next_renewal() == 6.0
    keeper.add(D0, LeaseId(3), 3.0, 4.0)  # a shorter one pulls the next renewal forward
    assert keeper.next_renewal() == 5.0
    for lease in (1, 2, 3, 3):
        keeper.drop(D0, LeaseId(lease))
    assert keeper.next_renewal() is None
    assert len(keeper) == 0
    keeper.drop(WorkerId("unknown"), LeaseId(1))
    keeper.leave(WorkerId("unknown"))
