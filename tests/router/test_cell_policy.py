"""Live placement in cells: small fleets as ever, large ones within a cell; nobody is refused unlooked-at."""

from __future__ import annotations

import random

import pytest

from bench.placement import TARGETS, Site
from cluster.ids import WorkerId
from cluster.wire.messages import WorkerState
from router.affinity import Near
from router.cell_policy import InCells
from router.cells import CellSettings
from router.config import PolicyConfig
from router.policy import Elastic, Placement, PlacementRequest, Reject, RejectReason
from tests.router.view_peers import DEFAULTS, Book, ask, hashes

ELASTIC = Elastic(PolicyConfig(), DEFAULTS)
FOURS = CellSettings(workers=4, most_together=4, refresh_s=0.0, oldest_s=0.0)


def names(num_prefill: int, num_decode: int) -> list[str]:
    return [f"p{index}" for index in range(num_prefill)] + [f"d{index}" for index in range(num_decode)]


def placed(
    policy: InCells, book: Book, request: PlacementRequest, now: float = 0.0
) -> tuple[str | None, str]:
    decision = policy.place(book.book.view(), request, now)
    assert isinstance(decision, Placement), decision
    return decision.prefill, decision.decode


def cell_of(name: str, num_cells: int) -> int:
    """Workers of either role are dealt in turn."""
    return int(name[1:]) % num_cells


@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_of_one_cell_decides_as_without_cells(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(12, 1_000, seed)
    policy, alone = InCells(Elastic(PolicyConfig(), TARGETS)), Elastic(PolicyConfig(), TARGETS)
    for index in range(60):
        request, view = site.request(), site.book.view()
        decision = policy.place(view, request, index * 0.1)
        assert decision == alone.place(view, request, index * 0.1)
        if isinstance(decision, Placement):
            site.claim(f"r{index}", request, decision)
        site.heartbeat(rng.choice(site.workers))


def test_prefill_and_decode_are_of_one_cell() -> None:
    book = Book(*names(8, 8))
    policy = InCells(ELASTIC, FOURS)
    cells = set()
    for index in range(60):
        prefill, decode = placed(policy, book, ask(max_tokens=index + 1), now=index)
        assert prefill is not None
        assert cell_of(prefill, 4) == cell_of(decode, 4)
        cells.add(cell_of(decode, 4))
    assert cells == {0, 1, 2, 3}


def test_a_decision_in_a_cell_is_that_of_a_fleet_of_its_workers() -> None:
    """Edges, prefixes and lives included: what a cell does not have is somebody else's."""
    rng = random.Random(5)
    site = Site(16, 2_000, 5)
    view = site.book.view()
    for _ in range(40):
        prefill, decode = rng.sample(site.workers[:4], 1) + rng.sample(site.workers[4:], 1)
        site.book.handed_over(prefill, decode, 10**8, rng.choice((0.001, 0.3)))
    policy, alone = InCells(Elastic(PolicyConfig(), TARGETS), FOURS), Elastic(PolicyConfig(), TARGETS)
    for index in range(80):
        request = site.request()
        decision = policy.place(view, request, float(index))
        assert isinstance(decision, Placement)
        cell = next(part for part in policy._parts if decision.decode in part.rows)
        others = [name for name in site.workers if name not in cell.rows]
        for name in others:
            site.book.heartbeat(name, WorkerState.DRAINING, site.book.state(name)[2], 0.0)
        expected = alone.place(view, request, float(index))
        for name in others:
            site.book.heartbeat(name, WorkerState.READY, site.book.state(name)[2], 0.0)
        assert decision == expected


def test_a_request_that_fits_nowhere_in_its_cell_goes_where_it_fits() -> None:
    book = Book(*names(0, 40), num_blocks=100)
    book.join("d40", num_blocks=5_000)
    policy = InCells(ELASTIC, FOURS)
    for index in range(30):
        assert placed(policy, book, ask(1_000, max_tokens=index + 1), now=index) == (None, "d40")


def test_the_last_room_there_is_is_found() -> None:
    book = Book(*names(0, 41), max_num_seqs=1)
    policy = InCells(ELASTIC, FOURS)
    taken = set()
    for index in range(41):
        _, decode = placed(policy, book, ask(max_tokens=index + 1), now=index)
        book.hold(decode)
        taken.add(decode)
    assert len(taken) == 41
    decision = policy.place(book.book.view(), ask(), 99.0)
    assert decision == Reject(RejectReason.BUSY)


@pytest.mark.parametrize("seed", range(6))
def test_refused_or_told_to_wait_only_if_the_whole_fleet_says_so(seed: int) -> None:
    rng = random.Random(seed)
    book = Book()
    for index in range(30):
        name = f"{'p' if index % 5 == 0 else 'd'}{index}"
        book.join(
            name,
            num_blocks=rng.choice((60, 400, 3_000)),
            max_num_seqs=rng.choice((1, 4)),
            on_time_prefill_s=rng.choice((0.0, 50.0)),
            late_prefill_s=rng.choice((0.0, 50.0)),
            decode_rows=20,
            decode_context=rng.choice((0, 900_000)),
        )
        if rng.random() < 0.3:
            book.beat(name, state=WorkerState.DRAINING)
    policy = InCells(ELASTIC, FOURS)
    outcomes = set()
    for index in range(150):
        size = rng.choice((10, 100, 1_000, 8_000, 50_000))
        request = ask(size, rng.choice((1, 500)), max_wait_s=rng.choice((1.0, 40.0)))
        view = book.book.view()
        decision, whole = policy.place(view, request, index * 0.01), ELASTIC.place(view, request, 0.0)
        assert isinstance(decision, Placement) == isinstance(whole, Placement)
        if isinstance(decision, Reject):
            assert decision == whole
            outcomes.add(decision.reason)
        else:
            if rng.random() < 0.5:
                book.take(f"r{index}", request, decision)
    assert RejectReason.TOO_LARGE in outcomes


def test_no_worker_is_said_when_nobody_is_ready() -> None:
    book = Book(*names(0, 12))
    for name in names(0, 12):
        book.beat(name, state=WorkerState.DRAINING)
    decision = InCells(ELASTIC, FOURS).place(book.book.view(), ask(), 0.0)
    assert decision == Reject(RejectReason.NO_WORKER)


def test_a_conversation_goes_back_to_its_cell() -> None:
    book = Book(*names(0, 40))
    book.cached("d33", hashes(4_000))
    policy = InCells(ELASTIC, FOURS)
    for index in range(20):
        assert placed(policy, book, ask(4_000, max_tokens=index + 1), now=index) == (None, "d33")


def test_a_prefix_that_all_have_draws_nobody_together() -> None:
    everybody = names(0, 40)
    book = Book(*everybody)
    for name in everybody:
        book.cached(name, hashes(400))
    policy = InCells(ELASTIC, FOURS)
    decodes = {placed(policy, book, ask(410, max_tokens=index + 1), now=index)[1] for index in range(100)}
    assert len({cell_of(name, 10) for name in decodes}) == 10


def test_a_session_goes_back_to_its_cell_while_no_prefix_is_known() -> None:
    book = Book(*names(0, 40))
    policy = InCells(ELASTIC, FOURS)
    near = Near(WorkerId("d13"), WorkerId("d13"))
    for index in range(20):
        request = ask(max_tokens=index + 1, near=near)
        assert placed(policy, book, request, now=index) == (None, "d13")
    gone = Near(WorkerId("d99"), WorkerId("d99"))
    placed(policy, book, ask(near=gone))


def test_workers_that_come_and_go_are_followed() -> None:
    book = Book(*names(0, 12))
    policy = InCells(ELASTIC, FOURS)
    placed(policy, book, ask())
    for name in names(0, 12):
        book.beat(name, decode_rows=30, decode_context=900_000)
    book.join("d12")
    found = [placed(policy, book, ask(max_tokens=index + 1), now=1.0 + index)[1] for index in range(40)]
    assert "d12" in found
    book.book.leave(WorkerId("d12"))
    found = [placed(policy, book, ask(max_tokens=index + 1), now=99.0 + index)[1] for index in range(40)]
    assert "d12" not in found


def test_summaries_age_and_placements_count_meanwhile() -> None:
    """A burst within one summary's life spreads over the cells."""
    book = Book(*names(0, 8))
    policy = InCells(ELASTIC, CellSettings(4, 4, refresh_s=10.0, oldest_s=15.0))
    counts = {0: 0, 1: 0}
    for index in range(100):
        _, decode = placed(policy, book, ask(max_tokens=index + 1), now=index * 1e-3)
        counts[cell_of(decode, 2)] += 1  # nothing is claimed: only the policy itself can know
    assert 45 <= counts[0] <= 55
    for name in names(0, 8)[::2]:  # the workers of the first cell
        book.beat(name, on_time_prefill_s=1.0)
    late = [placed(policy, book, ask(max_tokens=index + 1), now=20.0)[1] for index in range(20)]
    assert {cell_of(decode, 2) for decode in late} == {1}


def test_a_decision_makes_one_summary_unless_another_is_too_old() -> None:
    book = Book(*names(0, 8))
    policy = InCells(ELASTIC, CellSettings(4, 4, refresh_s=1.0, oldest_s=5.0))

    def ages(now: float) -> list[float]:
        placed(policy, book, ask(), now=now)
        return [now - part.told_at for part in policy._parts]

    assert ages(10.0) == [0.0, 0.0]  # there was none
    assert ages(10.5) == [0.5, 0.5]
    assert ages(11.5) == [0.0, 1.5]
    assert ages(12.0) == [0.5, 0.0]
    assert ages(20.0) == [0.0, 0.0]
