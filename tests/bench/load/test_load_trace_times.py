"""Timestamps of traces: what is out of order, and where nothing comes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.settings import PlanSettings, TraceReplay
from bench.load.plans.trace_times import HOLE, Holes, find_holes, num_out_of_order
from bench.load.plans.traces import read_trace
from bench.load.results.workload_text import workload_cautions


@given(st.lists(st.integers(0, 9), max_size=12))
def test_rows_out_of_order_are_those_below_a_later_one(times: list[int]) -> None:
    expected = sum(any(above > time for above in times[:row]) for row, time in enumerate(times))
    assert num_out_of_order(times) == expected
    assert num_out_of_order(sorted(times)) == 0


@given(st.integers(0, 2**32 - 1), st.integers(50, 400), st.floats(0.01, 100.0))
def test_steady_traffic_has_no_hole_and_one_that_is_put_in_is_found(seed: int, num: int, rate: float) -> None:
    gaps = np.random.default_rng(seed).exponential(1 / rate, num)
    times = np.cumsum(gaps).tolist()
    assert find_holes(times) is None
    where, pause_s = num // 2, 3 * HOLE / rate * float(gaps.mean() * rate)
    broken = [*times[:where], *(time + pause_s for time in times[where:])]
    holes = find_holes(broken)
    assert holes is not None
    assert holes.num == 1
    assert holes.longest_from_s == times[where - 1]
    assert holes.longest_s == pytest.approx(pause_s + times[where] - times[where - 1])


def test_timestamps_of_whole_seconds_are_a_rhythm_and_no_holes() -> None:
    assert find_holes([float(i // 50) * 3 for i in range(5000)]) is None


def test_several_holes_do_not_hide_one_another() -> None:
    times = [day * 1e5 + second for day in range(3) for second in range(200)]
    assert find_holes(times) == Holes(num=2, total_s=2 * (1e5 - 199), longest_s=1e5 - 199, longest_from_s=199)


@pytest.mark.parametrize("times", [[], [1.0], [0.0, 1000.0], [0.0, 0.0, 0.0, 5.0]])
def test_too_few_rows_say_nothing(times: list[float]) -> None:
    assert find_holes(times) is None


def write(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    """(seconds, input, output) as a canonical trace."""
    lines = (json.dumps({"timestamp": t * 1e3, "input_length": i, "output_length": o}) for t, i, o in rows)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_is_odd_about_a_trace_is_in_the_plan_and_in_words(tmp_path: Path) -> None:
    rows = [(float(i), 10, 2) for i in range(40)]
    rows[10], rows[11] = rows[11], rows[10]
    rows += [(2000.0 + i, 10, 2) for i in range(10)]
    path = write(tmp_path / "odd.jsonl", rows)
    assert read_trace(path).num_out_of_order == 1
    workload = TraceReplay(path=str(path), speed_up=10.0)
    plan = build_plan(PlanSettings(model="m", arrival=arrivals.trace_times(), workload=workload), None)
    assert plan.workload["num_rows_out_of_order"] == 1
    order, hole = workload_cautions(plan.workload)
    assert order.startswith("1 of 50 trace rows are earlier than one above them")
    assert "1 hole, in which nothing is offered: the longest begins 3.9 s into the run" in hole
    assert "lasts 196.1 s, in the trace's time 1961.0 s" in hole


def test_other_arrivals_have_no_holes(tmp_path: Path) -> None:
    path = write(tmp_path / "hole.jsonl", [(float(i + 5000 * (i > 30)), 10, 2) for i in range(60)])
    settings = PlanSettings(
        model="m", arrival=arrivals.poisson(5.0, 0), workload=TraceReplay(path=str(path)), num_requests=50
    )
    assert workload_cautions(build_plan(settings, None).workload) == []


def test_rows_that_were_skipped_between_those_taken_are_counted(tmp_path: Path) -> None:
    """Too long for the model, or without tokens; those before the first and after the last are not among."""
    lengths = [(500, 9), (10, 2), (500, 9), (10, 2), (10, 0), (10, 2), (10, 0), (10, 2), (500, 9)]
    path = write(tmp_path / "long.jsonl", [(float(i), *both) for i, both in enumerate(lengths)])
    settings = PlanSettings(
        model="m", arrival=arrivals.trace_times(), workload=TraceReplay(path=str(path)), max_model_len=100
    )
    trace = build_plan(settings, None).trace
    assert trace is not None
    assert (trace.num_rows, trace.num_rows_skipped) == (4, 3)
