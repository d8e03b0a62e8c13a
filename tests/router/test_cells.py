"""Cells of a large fleet: which are probed, which is best, and what has been placed since they last spoke."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from router.cells import CellAsk, CellBook, CellLoad, CellSettings, load_of, probes
from router.elastic import Ask, ElasticSettings, predicted_ttft_s
from router.fleet import Fleet

MODEL = StepModel(0.9e-3, 5.0e-3, 19.1e-6, 46.8e-9, 1.05e-9)
SETTINGS = CellSettings()
STEP_S = 0.02


def fleet(num_workers: int = 4) -> Fleet:
    return Fleet([MODEL] * num_workers, [100_000.0] * num_workers, [1e9] * num_workers)


def book(*loads: CellLoad) -> CellBook:
    return CellBook(loads, SETTINGS)


def idle(**changes: float) -> CellLoad:
    return msgspec.structs.replace(load_of(fleet()), **changes)


def ask(num_tokens: int = 1_000, draw: int = 0, **changes: object) -> CellAsk:
    values = {"num_tokens": num_tokens, "kv_tokens": num_tokens + 1, "expected_output": 100.0}
    return CellAsk(**(values | {"step_s": STEP_S, "draw": draw} | changes))  # type: ignore[arg-type]


def test_probes_are_different_cells_and_all_of_few() -> None:
    assert probes(5, 2, 2) == [0, 1]
    assert probes(5, 1, 2) == [0]
    for draw in range(200):
        assert len(set(probes(draw, 3, 2))) == 2
        assert sorted(probes(draw, 80, 5)) == sorted(set(probes(draw, 80, 5)))


def test_probes_spread_evenly_and_pairs_differ() -> None:
    pairs = [tuple(probes(draw, 20, 2)) for draw in range(20_000)]
    counts = Counter(cell for pair in pairs for cell in pair)
    assert set(counts) == set(range(20))
    assert max(counts.values()) < 1.1 * 2_000
    assert min(counts.values()) > 0.9 * 2_000
    assert len(set(pairs)) == 20 * 19


def test_a_summary_is_the_mean_worker_of_those_that_may_compute() -> None:
    cell = fleet(4)
    cell.work_s[:] = (0.1, 0.2, 0.3, 9.0)
    cell.late_s[0] = 0.3
    cell.rows[:] = (10, 0, 20, 500)
    cell.coming_rows[1] = 30
    cell.context[:] = (1_000, 2_000, 3_000, 10**6)
    cell.kv_used[:] = (10_000, 20_000, 0, 90_000)
    cell.kv_promised[2] = 30_000
    cell.can_prefill[3] = False
    load = load_of(cell)
    assert load.num_workers == 3
    assert load.work_s == pytest.approx(0.3)
    assert load.decode_s == pytest.approx(
        MODEL.fixed_s + 20 * MODEL.per_token_s + 2_000 * MODEL.per_context_s
    )
    assert load.held == pytest.approx(0.2)
    assert load.largest == 100_000
    cell.can_prefill[:] = False
    assert load_of(cell) == CellLoad()


def test_a_cell_of_one_busy_worker_is_judged_as_placement_judges_the_worker() -> None:
    """But for half a step of waiting, and what placement keeps of a step as safety."""
    cell = fleet(1)
    cell.work_s[0], cell.rows[0], cell.context[0] = 0.3, 60, 48_000
    targets = Targets(1e3, STEP_S)
    settings = ElasticSettings(safety=1.0)
    expected = predicted_ttft_s(cell, Ask(2_000, 100.0), targets, settings)[0] - STEP_S / 2
    found = load_of(cell).first_token_s(2_000, 0.0, STEP_S, SETTINGS)
    assert found == pytest.approx(expected, rel=0.02)


def test_the_cell_where_the_first_token_is_soonest_is_best() -> None:
    assert book(idle(work_s=0.2), idle(work_s=0.1)).best(ask()) == 1
    assert book(idle(decode_s=0.012), idle(decode_s=0.002)).best(ask()) == 1
    assert book(idle(), idle()).best_first([1, 0], ask()) == [1, 0]


def test_a_prefix_is_worth_what_it_saves() -> None:
    saved_s = idle().own_s(1_000, 0.0) - idle().own_s(1_000, 900.0)
    cached = ask(cached={1: 900.0})
    assert book(idle(), idle(work_s=0.9 * saved_s)).best(cached) == 1
    assert book(idle(), idle(work_s=1.5 * saved_s)).best(cached) == 0


def test_the_cell_with_a_prefix_is_probed_too() -> None:
    cells = book(*(idle() for _ in range(40)))
    drawn = probes(7, 40, 2)
    holder = next(cell for cell in range(40) if cell not in drawn)
    assert cells.probed(ask(draw=7, cached={holder: 10.0})) == [holder, *drawn]
    assert cells.best(ask(draw=7, cached={holder: 900.0})) == holder


def test_the_cell_of_the_session_is_probed_and_taken_among_near_equals() -> None:
    cells = book(*(idle(work_s=0.1) for _ in range(40)))
    last = next(cell for cell in range(40) if cell not in probes(7, 40, 2))
    assert cells.best(ask(draw=7, near=last)) == last
    assert cells.best_first([0, 1], ask(near=1)) == [1, 0]
    assert book(idle(work_s=0.1), idle(work_s=0.2)).best(ask(near=1)) == 0


def test_a_cell_nearly_full_of_kv_comes_last() -> None:
    assert book(idle(held=0.97), idle(work_s=5.0)).best(ask()) == 1
    assert book(idle(held=0.99), idle(held=0.96, work_s=5.0)).best(ask()) == 1
    assert book(idle(held=0.94), idle(work_s=5.0)).best(ask()) == 0


def test_what_was_placed_since_the_summary_counts() -> None:
    cells = book(*(idle() for _ in range(10)))
    placed: Counter[int] = Counter()
    for draw in range(1_000):
        one = ask(draw=draw)
        cell = cells.best(one)
        assert cell is not None
        cells.placed(cell, one)
        placed[cell] += 1
    assert max(placed.values()) - min(placed.values()) <= 6
    assert cells.load(0).work_s == pytest.approx(placed[0] * idle().own_s(1_000, 0.0) / 4)


def test_a_request_that_its_cells_could_never_hold_goes_to_one_that_could() -> None:
    loads = [idle() for _ in range(30)]
    loads[17] = idle(largest=500_000.0, work_s=9.0)
    for draw in range(50):
        assert book(*loads).best(ask(200_000, draw)) == 17
    assert book(*loads).best(ask(600_000)) is None


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 9)), min_size=1, max_size=12), st.integers(0, 2**64)
)
def test_some_cell_is_found_if_any_could_hold_it(cells: list[tuple[int, float]], draw: int) -> None:
    loads = [idle(largest=1_000.0 * size, work_s=work_s) for size, work_s in cells]
    found = book(*loads).best(ask(25_000, draw))
    if all(size <= 25 for size, _ in cells):
        assert found is None
    else:
        assert found is not None
        assert loads[found].largest > 25_000


def test_a_cell_where_nobody_may_compute_is_never_best() -> None:
    assert book(CellLoad(), idle(work_s=99.0)).best(ask()) == 1
    assert book(CellLoad()).best(ask()) is None
