"""Where elastic loses: which cells are drawn, what is searched in one, and what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.load.plans.trace_formats import TraceRow
from bench.simulator import losses
from bench.simulator.losses import H20, H100, Cell, cells, fixed_policies, pool_of, setup_of, text_table

CELL = Cell(f"{H100}:2,{H20}:1", 5.0, "conv", (0.5, 2.0), "ttft=0.5s,tpot=25ms")
PATHS = {"conv": Path("conv.csv")}


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_rows", lambda path: (TraceRow(0.0, 4_000, 250), TraceRow(1.0, 1, 1)))


def test_a_draw_is_the_same_every_time_and_a_longer_one_begins_with_it() -> None:
    drawn = cells(("conv", "code"), 60)
    assert len({cell.name for cell in drawn}) == 60
    assert cells(("conv", "code"), 200)[:60] == drawn


def test_a_cell_says_what_steps_cost_and_how_long_its_lengths_are() -> None:
    setup = setup_of(CELL, PATHS, None)
    assert [(row.input_tokens, row.output_tokens) for row in setup.rows] == [(2_000, 500), (1, 2)]
    assert [one.model.mixed_s for one in setup.pool] == [5e-3] * 3
    assert setup.pool[0] is setup.pool[1]
    free = pool_of(Cell(f"{H100}:2", 0.0, "conv", (1.0, 1.0), CELL.slo))
    assert [one.model.mixed_s for one in free] == [0.0, 0.0]


@pytest.mark.parametrize("num_workers", [2, 3, 4, 16])
def test_fixed_policies_are_made_for_the_pool(num_workers: int) -> None:
    texts = [one.text for one in fixed_policies(num_workers)]
    assert len(set(texts)) == len(texts)
    assert any(text.startswith("static:") for text in texts)


def test_known_fixed_policies_are_kept_and_a_cell_that_nobody_can_serve_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def search(setup: Any, seeds: Any, start: float | None = None) -> tuple[dict[str, Any], list[Any]]:
        asked.append(setup.policy.text)
        return {"answers": [{"seeds": [{"rate": rate} for _ in seeds]}]}, []

    rate = 6.0
    monkeypatch.setattr(losses, "max_goodput", search)
    monkeypatch.setattr(losses, "find_best", lambda setup, policies, seed: (policies[0], 1.0))
    found = losses.measure(CELL, PATHS, 2, None, {})
    assert found is not None
    assert (asked, found["over_best"]) == (["elastic", "colocated:512:srf"], 1.0)
    kept = {"policy": "static:2p1d", "rate": 8.0, "per_seed": [8.0, 8.0]}
    again = losses.measure(CELL, PATHS, 2, None, {CELL.name: {"fixed": kept}})
    assert again is not None
    assert (asked[2:], again["over_best"]) == (["elastic"], 0.75)
    assert "elastic loses in 1" in text_table([found, again])
    rate = 0.0
    assert losses.measure(CELL, PATHS, 2, None, {}) is None
