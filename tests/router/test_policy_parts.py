"""What placement and admission stand on: the book of workers, beliefs, deadlines, the queue, leases."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import BlockHash, LeaseId, RequestId, WorkerId
from cluster.wire.messages import Role, WorkerLoad, WorkerState
from router.admission import MAX_SCAN, AdmissionQueue
from router.deadlines import Deadlines
from router.leases import LeaseKeeper
from router.prefix_index import PrefixIndex
from router.view import InFlight, WorkerBook
from tests.router.conductor_peers import make_register

D0, P0 = WorkerId("d0"), WorkerId("p0")


def book(**settings: int) -> WorkerBook:
    made = WorkerBook(stall_timeout_s=10.0)
    made.join(make_register("d0", Role.DECODE, **settings), 0.0)
    made.join(make_register("p0", Role.PREFILL, **settings), 0.0)
    return made


# ---- the book of workers


def test_a_worker_is_ready_from_its_first_heartbeat_on() -> None:
    made = book()
    assert not made.view().decode[0].is_ready
    made.heartbeat(D0, WorkerState.READY, WorkerLoad(), 0.0)
    assert made.view().decode[0].is_ready
    made.heartbeat(D0, WorkerState.DRAINING, WorkerLoad(), 0.5)
    assert not made.view().decode[0].is_ready


def test_load_is_what_was_reported_and_what_was_placed_since() -> None:
    made = book(num_blocks=100, max_num_seqs=10)
    mine = RequestId("mine")
    made.place(P0, mine, InFlight(50, 0))
    made.place(D0, mine, InFlight(0, 20))
    assert made.view().prefill[0].backlog_tokens == 50
    assert (made.view().decode[0].slots_available, made.view().decode[0].blocks_available) == (9, 80)
    # The worker reports it, and what another router sent: nothing is counted twice.
    made.heartbeat(P0, WorkerState.READY, WorkerLoad(queued_prefill_tokens=80, waiting=2), 0.5)
    made.heartbeat(D0, WorkerState.READY, WorkerLoad(running=2, waiting=1, blocks_used=35), 0.5)
    assert made.view().prefill[0].backlog_tokens == 80
    assert (made.view().decode[0].slots_available, made.view().decode[0].blocks_available) == (7, 65)
    # Between heartbeats places become free at once.
    made.prefilled(P0, mine)
    made.remove(D0, mine)
    assert made.view().prefill[0].backlog_tokens == 30
    assert (made.view().decode[0].slots_available, made.view().decode[0].blocks_available) == (8, 85)


def test_views_are_rebuilt_only_when_something_changed() -> None:
    made = book()
    first = made.view()
    assert made.view() is first
    made.place(D0, RequestId("r"), InFlight(0, 1))
    second = made.view()
    assert second is not first
    assert second.prefill[0] is first.prefill[0]


def test_a_refusal_holds_until_there_is_news() -> None:
    made = book()
    for name, size in (("a", 30), ("b", 20)):
        made.place(D0, RequestId(name), InFlight(0, size))
    made.refused(D0, RequestId("a"), whatever_size=False)
    made.refused(D0, RequestId("b"), whatever_size=False)
    assert made.view().decode[0].refused_blocks == 20
    assert made.in_flight() == {}
    made.heartbeat(D0, WorkerState.READY, WorkerLoad(), 0.5)
    assert made.view().decode[0].refused_blocks is None
    made.place(D0, RequestId("c"), InFlight(0, 9))
    made.place(D0, RequestId("d"), InFlight(0, 9))
    made.refused(D0, RequestId("c"), whatever_size=True)
    assert made.view().decode[0].refused_blocks == 0
    made.remove(D0, RequestId("d"))
    assert made.view().decode[0].refused_blocks is None


def test_stuck_is_work_without_steps() -> None:
    made = book()
    busy = WorkerLoad(running=1, steps=5)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 0.0)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 9.9)
    assert made.heartbeat(D0, WorkerState.READY, busy, 10.0)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 10.5)  # said once
    assert not made.view().decode[0].is_ready
    assert not made.heartbeat(D0, WorkerState.READY, WorkerLoad(running=1, steps=6), 11.0)
    assert made.view().decode[0].is_ready
    # Waiting for KV is not work of the engine, and idle engines need not step.
    waiting = WorkerLoad(waiting=3, steps=6)
    for now in range(12, 60):
        assert not made.heartbeat(D0, WorkerState.READY, waiting, float(now))


def test_leaving_takes_everything_along() -> None:
    made = book()
    made.place(D0, RequestId("a"), InFlight(0, 1))
    made.place(D0, RequestId("b"), InFlight(0, 1))
    made.believe_cached(D0, [BlockHash(b"x")])
    assert made.leave(D0) == ["a", "b"]
    assert made.in_flight() == {}
    made.remove(D0, RequestId("a"))
    made.prefilled(D0, RequestId("a"))
    made.believe_cached(D0, [BlockHash(b"x")])
    made.join(make_register("d0", Role.DECODE, epoch=2), 1.0)
    assert made.view().decode[0].cached_tokens([BlockHash(b"x")]) == 0


# ---- beliefs


def chain(length: int, name: str = "") -> list[BlockHash]:
    return [BlockHash(f"{name}{i}".encode()) for i in range(length)]


def test_prefix_index_counts_from_the_start() -> None:
    index = PrefixIndex(10)
    index.insert(chain(4))
    assert index.num_cached_blocks(chain(6)) == 4
    assert index.num_cached_blocks(chain(2)) == 2
    assert index.num_cached_blocks([BlockHash(b"other"), *chain(4)]) == 0


def test_prefix_index_forgets_the_oldest_and_ends_first() -> None:
    index = PrefixIndex(6)
    index.insert(chain(4, "a"))
    index.insert(chain(4, "b"))
    assert index.num_cached_blocks(chain(4, "b")) == 4
    assert index.num_cached_blocks(chain(4, "a")) == 2
    index.insert(chain(9, "c"))
    assert len(index) == 6
    assert index.num_cached_blocks(chain(9, "c")) == 6


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
