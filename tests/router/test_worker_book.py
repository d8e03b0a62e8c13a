"""The book of workers: reports, what has happened since, and rows that never drift from what is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.step_model import StepModel
from cluster.wire.kv_events import KvEvents
from cluster.wire.messages import Role, WorkerLoad, WorkerState
from router.claims import Backlog, Claim, Phase, Totals
from router.view import ClusterView
from router.worker_book import WorkerBook
from tests.router.conductor_peers import make_register
from tests.router.view_peers import CPU

D0, P0 = WorkerId("d0"), WorkerId("p0")
MINE = RequestId("mine")


def book(**settings: int) -> WorkerBook:
    made = WorkerBook(stall_timeout_s=10.0)
    made.join(make_register("d0", Role.DECODE, **settings), 0.0)
    made.join(make_register("p0", Role.PREFILL, **settings), 0.0)
    return made


def at(made: WorkerBook, worker: WorkerId) -> int:
    return made.view().rows[worker]


def work_s(made: WorkerBook, worker: WorkerId) -> float:
    return float(made.view().fleet.work_s[at(made, worker)])


def prompt(
    num_tokens: int, *, stays: bool = False, num_blocks: int = 0, sent_at: float | None = 0.0
) -> Claim:
    return Claim(
        Phase.PREFILL, num_tokens, new_tokens=num_tokens, num_blocks=num_blocks, stays=stays, sent_at=sent_at
    )


def beat(made: WorkerBook, worker: WorkerId, now: float, **load: object) -> bool:
    return made.heartbeat(worker, WorkerState.READY, WorkerLoad(step_model=CPU, **load), now)  # type: ignore[arg-type]


# ---- roles


def test_a_worker_that_comes_back_in_another_role_may_do_what_that_may_and_is_counted() -> None:
    made = book()
    beat(made, D0, 0.0)
    for epoch, role in ((2, Role.DECODE), (3, Role.PREFILL), (4, Role.PREFILL), (5, Role.DECODE)):
        made.leave(D0)
        made.join(make_register("d0", role, epoch), 0.0)
        beat(made, D0, 0.0)
        view, is_decode = made.view(), role is Role.DECODE
        assert view.has(Role.DECODE) == view.has_ready(Role.DECODE) == is_decode
        assert bool(view.fleet.can_decode[at(made, D0)]) == is_decode
        assert bool(view.fleet.can_send[at(made, D0)]) != is_decode
    assert made.role_shifts() == {(Role.DECODE, Role.PREFILL): 1, (Role.PREFILL, Role.DECODE): 1}


# ---- readiness


def test_a_worker_is_ready_from_its_first_heartbeat_on() -> None:
    made = book()
    view = made.view()
    assert view.has(Role.DECODE)
    assert not view.has_ready(Role.DECODE)
    made.heartbeat(D0, WorkerState.READY, WorkerLoad(), 0.0)
    assert view.has_ready(Role.DECODE)
    assert not view.has_ready(Role.PREFILL)
    assert view.is_ready(D0)
    made.heartbeat(D0, WorkerState.DRAINING, WorkerLoad(), 0.5)
    assert not view.has_ready(Role.DECODE)


def test_stuck_is_work_without_steps() -> None:
    made = book()
    busy = WorkerLoad(running=1, steps=5)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 0.0)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 9.9)
    assert made.heartbeat(D0, WorkerState.READY, busy, 10.0)
    assert not made.heartbeat(D0, WorkerState.READY, busy, 10.5)  # said once
    assert not made.view().is_ready(D0)
    assert not made.heartbeat(D0, WorkerState.READY, WorkerLoad(running=1, steps=6), 11.0)
    assert made.view().is_ready(D0)
    # Waiting for KV is not work of the engine, and idle engines need not step.
    waiting = WorkerLoad(waiting=3, steps=6)
    for now in range(12, 60):
        assert not made.heartbeat(D0, WorkerState.READY, waiting, float(now))


# ---- load


def test_load_is_what_was_reported_and_what_was_placed_since() -> None:
    made = book(num_blocks=100, max_num_seqs=10)
    view = made.view()
    d0 = at(made, D0)
    made.place(P0, MINE, prompt(50, sent_at=None))
    made.place(D0, MINE, Claim(Phase.COMING, 50, num_blocks=20))
    assert (view.slots[d0], view.blocks[d0]) == (9, 80)
    assert (view.fleet.coming_rows[d0], view.fleet.coming_context[d0]) == (1, 50)
    each_s, per_key_s = view.fleet.per_token_s[d0], view.fleet.per_context_s[d0]
    assert view.fleet.far_load_s[d0] == pytest.approx(each_s + 50 * per_key_s) != 0.0
    # The worker reports it, and what another router sent: nothing is counted twice.
    beat(made, D0, 0.5, running=2, waiting=1, blocks_used=35, decode_rows=2, coming_rows=1, coming_context=50)
    assert (view.slots[d0], view.blocks[d0]) == (7, 65)
    assert (view.fleet.rows[d0], view.fleet.coming_rows[d0]) == (2, 1)
    made.decoding(D0, MINE)
    assert (view.fleet.rows[d0], view.fleet.context[d0], view.fleet.coming_rows[d0]) == (3, 50, 0)
    assert view.fleet.far_load_s[d0] == 0.0
    # Between heartbeats places become free at once.
    made.remove(D0, MINE)
    assert (view.slots[d0], view.blocks[d0], view.fleet.rows[d0]) == (8, 85, 2)


def test_work_a_worker_was_told_of_in_time_is_part_of_its_report() -> None:
    made = book()
    beat(made, P0, 0.0)
    seconds = 1000 * CPU.per_token_s
    made.place(P0, RequestId("a"), prompt(1000, sent_at=0.0))
    made.place(P0, RequestId("b"), prompt(1000, sent_at=0.49))
    made.place(P0, RequestId("c"), prompt(1000, sent_at=None))
    assert work_s(made, P0) == pytest.approx(3 * seconds)
    beat(made, P0, 0.5, on_time_prefill_s=seconds / 4)  # three quarters of a; b may have been under way
    assert work_s(made, P0) == pytest.approx(2.25 * seconds)
    made.prefilled(P0, RequestId("a"))
    assert work_s(made, P0) == pytest.approx(2 * seconds)
    made.told(P0, RequestId("c"), 0.5)
    beat(made, P0, 1.0, on_time_prefill_s=4 * seconds)  # somebody else's too
    assert work_s(made, P0) == pytest.approx(4 * seconds)
    made.remove(P0, RequestId("c"))
    assert work_s(made, P0) == pytest.approx(3 * seconds)


def test_late_work_is_the_workers_word() -> None:
    made = book()
    made.place(P0, MINE, prompt(1000))
    beat(made, P0, 1.0, late_prefill_s=1000 * CPU.per_token_s)
    assert work_s(made, P0) == 0.0
    assert made.view().fleet.late_s[at(made, P0)] == pytest.approx(1000 * CPU.per_token_s)


def test_a_local_prompt_is_load_to_come_then_a_row() -> None:
    made = book()
    fleet, d0 = made.view().fleet, at(made, D0)
    beat(made, D0, 0.0)
    made.place(D0, MINE, prompt(400, stays=True))
    load_s = CPU.per_token_s + 400 * CPU.per_context_s
    assert fleet.queued_load_s[d0] == pytest.approx(load_s)
    assert (fleet.coming_rows[d0], fleet.rows[d0], fleet.far_load_s[d0]) == (1, 0, 0.0)
    beat(made, D0, 1.0, queued_load_s=load_s, coming_rows=1, coming_context=400)
    assert fleet.queued_load_s[d0] == pytest.approx(load_s)
    made.prefilled(D0, MINE)
    assert fleet.queued_load_s[d0] == 0.0
    assert (fleet.coming_rows[d0], fleet.rows[d0], fleet.context[d0]) == (0, 1, 400)


def test_without_a_model_the_gauges_stand_in() -> None:
    made = book()
    load = WorkerLoad(queued_prefill_tokens=500, prefill_tokens_per_s=2000.0, decode_step_s=0.03)
    made.heartbeat(P0, WorkerState.READY, load, 0.0)
    fleet, p0 = made.view().fleet, at(made, P0)
    assert work_s(made, P0) == pytest.approx(0.25)
    assert (fleet.per_token_s[p0], fleet.floor_s[p0]) == (pytest.approx(5e-4), 0.03)
    assert p0 in made.view().guessed


def test_a_refusal_holds_until_there_is_news() -> None:
    made = book()
    refused, d0 = made.view().refused, at(made, D0)
    for name, size in (("a", 30), ("b", 20)):
        made.place(D0, RequestId(name), Claim(Phase.COMING, 1, num_blocks=size))
    made.refused(D0, RequestId("a"), whatever_size=False)
    made.refused(D0, RequestId("b"), whatever_size=False)
    assert refused[d0] == 20
    assert made.in_flight() == {}
    made.heartbeat(D0, WorkerState.READY, WorkerLoad(), 0.5)
    assert refused[d0] == float("inf")
    made.place(D0, RequestId("c"), Claim(Phase.COMING, 1, num_blocks=9))
    made.place(D0, RequestId("d"), Claim(Phase.COMING, 1, num_blocks=9))
    made.refused(D0, RequestId("c"), whatever_size=True)
    assert refused[d0] == 0
    made.remove(D0, RequestId("d"))
    assert refused[d0] == float("inf")


# ---- beliefs


def found(view: ClusterView, worker: WorkerId, hashes: tuple[BlockHash, ...]) -> int:
    column = view.prefix.lookup(hashes, view.fleet.num_workers)
    return 0 if column is None else int(column[view.rows[worker]])


def test_a_placed_prompt_is_expected_until_its_worker_had_time_to_report_it() -> None:
    made = book()
    hashes = (BlockHash(b"x"), BlockHash(b"y"))
    assert made.cache_changed(D0, KvEvents(sequence=0, begins=True, stored=[], removed=[]))
    made.place(D0, MINE, Claim(Phase.COMING, 8, hashes=hashes))
    assert found(made.view(), D0, hashes) == 2
    beat(made, D0, 0.5)
    made.remove(D0, MINE)
    beat(made, D0, 1.0)  # may have left before the end was known there
    assert found(made.view(), D0, hashes) == 2
    beat(made, D0, 1.5)
    assert found(made.view(), D0, hashes) == 0
    assert len(made.view().prefix) == 0


def test_a_worker_that_reports_nothing_is_believed_to_keep_what_its_pool_holds() -> None:
    made = book(num_blocks=5)
    chains = [tuple(BlockHash(f"{name}{i}".encode()) for i in range(2)) for name in "abc"]
    for now, hashes in enumerate(chains):
        made.place(D0, MINE, Claim(Phase.COMING, 8, hashes=hashes))
        made.remove(D0, MINE)
        beat(made, D0, float(now))
    for now in (3.0, 4.0):
        beat(made, D0, now)
    assert [found(made.view(), D0, hashes) for hashes in chains] == [0, 2, 2]
    assert made.cache_changed(D0, KvEvents(sequence=0, begins=True, stored=list(chains[0]), removed=[]))
    beat(made, D0, 5.0)  # now it has said what it has
    assert [found(made.view(), D0, hashes) for hashes in chains] == [2, 0, 0]


def test_leaving_takes_everything_along() -> None:
    made = book()
    fleet, d0 = made.view().fleet, at(made, D0)
    hashes = (BlockHash(b"x"),)
    for name in ("a", "b"):
        made.place(D0, RequestId(name), Claim(Phase.COMING, 8, num_blocks=2, hashes=hashes))
    made.remove(D0, RequestId("b"))
    made.handed_over(P0, D0, 1000, 0.5)
    assert made.leave(D0) == ["a"]
    assert made.in_flight() == {}
    made.remove(D0, RequestId("a"))
    made.prefilled(D0, RequestId("a"))
    made.decoding(D0, RequestId("a"))
    made.handed_over(P0, D0, 1000, 0.5)
    assert not fleet.can_decode[d0]
    assert len(made.view().prefix) == 0
    made.join(make_register("d0", Role.DECODE, epoch=2), 1.0)
    assert made.epoch(D0) == Epoch(2)
    assert found(made.view(), D0, hashes) == 0
    assert fleet.coming_rows[at(made, D0)] == 0
    assert fleet.exposed_s(at(made, P0), 0.0, 0.002)[at(made, D0)] == pytest.approx(0.022)  # cold


# ---- incremental equals rebuilt


class Life:
    """Random but possible lives of requests and workers, on one book."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.book = WorkerBook(stall_timeout_s=3.0)
        self.now = 0.0
        self.num = 0
        self.here: list[WorkerId] = []

    def move(self) -> None:
        self.now += self.rng.random() * 0.2
        self.rng.choice([self.join, *[self.beat] * 4, *[self.place] * 4, *[self.advance] * 6, self.leave])()

    def join(self) -> None:
        if len(self.here) < 6:
            self.num += 1
            role = self.rng.choice(list(Role))
            name = WorkerId(f"{role.value}-{self.num}")
            self.book.join(make_register(name, role), self.now)
            self.here.append(name)

    def leave(self) -> None:
        if self.here and self.rng.random() < 0.3:
            self.book.leave(self.here.pop(self.rng.randrange(len(self.here))))

    def beat(self) -> None:
        if self.here:
            rng = self.rng
            load = WorkerLoad(
                running=rng.randrange(5),
                waiting=rng.randrange(5),
                queued_prefill_tokens=rng.randrange(500),
                blocks_used=rng.randrange(300),
                steps=rng.randrange(3),
                step_model=rng.choice([None, CPU, StepModel(0.0, 0.02, 1e-3, 2e-7, 3e-8)]),
                on_time_prefill_s=rng.random(),
                late_prefill_s=rng.random(),
                queued_load_s=rng.random() * 0.01,
                decode_rows=rng.randrange(5),
                decode_context=rng.randrange(3000),
                coming_rows=rng.randrange(3),
                coming_context=rng.randrange(900),
                row_life_s=rng.random(),
            )
            self.book.heartbeat(rng.choice(self.here), rng.choice(list(WorkerState)), load, self.now)

    def place(self) -> None:
        if self.here:
            self.num += 1
            rng = self.rng
            claim = Claim(
                rng.choice([Phase.PREFILL, Phase.COMING]),
                rng.randrange(1, 300),
                new_tokens=rng.randrange(1, 300),
                attention=rng.randrange(10**5),
                num_blocks=rng.randrange(70),
                stays=rng.random() < 0.5,
                hashes=tuple(BlockHash(b"%d" % i) for i in range(rng.randrange(4))),
                sent_at=rng.choice([None, self.now]),
            )
            self.book.place(rng.choice(self.here), RequestId(f"r{self.num}"), claim)

    def advance(self) -> None:
        flying = self.book.in_flight()
        if not flying:
            return
        rng = self.rng
        worker = rng.choice(sorted(flying))
        request = rng.choice(flying[worker])
        rng.choice(
            [
                lambda: self.book.told(worker, request, self.now),
                lambda: self.book.prefilled(worker, request),
                lambda: self.book.decoding(worker, request),
                lambda: self.book.remove(worker, request),
                lambda: self.book.refused(worker, request, whatever_size=rng.random() < 0.5),
                lambda: self.book.handed_over(worker, rng.choice(self.here), 100, rng.random()),
            ]
        )()


@given(seed=st.integers(0, 2**32))
def test_the_rows_are_what_a_rebuilt_view_would_say(seed: int) -> None:
    life = Life(seed)
    for _ in range(120):
        life.move()
        view = life.book.view()
        for known in life.book._workers.values():
            totals = Totals()
            for claim in known.claims:
                totals.move(claim, 1)
            assert totals == known.claims.totals
        before = view.fleet.copy()
        columns = [column.copy() for column in (view.slots, view.blocks, view.refused, view.life_s)]
        life.book.rewrite()
        assert before.equals(view.fleet)
        for old, new in zip(columns, (view.slots, view.blocks, view.refused, view.life_s), strict=True):
            assert (old == new).all()
    for worker, requests in life.book.in_flight().items():
        for request in requests:
            life.book.remove(worker, request)
    for known in life.book._workers.values():
        assert known.claims.totals == Totals()
        assert life.book.cache_changed(
            known.register.worker, KvEvents(sequence=0, begins=True, stored=[], removed=[])
        )
        for now in (1e3, 2e3):
            life.book.heartbeat(known.register.worker, WorkerState.READY, WorkerLoad(), now)
    assert len(life.book.view().prefix) == 0
    assert sorted(life.book.view().rows) == sorted(life.here)
    assert not life.book.view().fleet.kv_used.any()


@given(
    events=st.lists(st.tuples(st.booleans(), st.floats(0, 10), st.floats(0, 10)), max_size=20),
    own=st.floats(0, 100),
)
def test_a_backlog_is_never_negative(events: list[tuple[bool, float, float]], own: float) -> None:
    backlog = Backlog()
    for is_report, a, b in events:
        if is_report:
            backlog.report(a, b)
            assert backlog.value(b) == pytest.approx(a)
        else:
            backlog.left(a)
        assert backlog.value(own) >= 0


def test_rows_that_need_not_be_in_every_step_do_not_count_among_those_that_do() -> None:
    made = book()
    beat(
        made,
        D0,
        0.0,
        decode_rows=9,
        decode_context=900,
        yielding_rows=4,
        yielding_context=500,
        late_rate=0.3,
        on_time_share=0.5,
    )
    fleet, row = made.view().fleet, at(made, D0)
    assert (fleet.rows[row], fleet.context[row]) == (5, 400)
    assert (fleet.late_rate[row], fleet.on_time_share[row]) == (0.3, 0.5)
    assert fleet.yield_s[row] == pytest.approx(4 * CPU.per_token_s + 500 * CPU.per_context_s)
    beat(made, D0, 0.5, decode_rows=1, decode_context=100)
    assert (fleet.rows[row], fleet.yield_s[row], fleet.late_rate[row]) == (1, 0, 0)
