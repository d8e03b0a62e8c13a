"""The pure parts of the report: what is drawn of very many requests, and how a timeline row is laid out."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.records import RequestRecord, Status
from bench.load.report import ReportRun, render_report
from bench.load.report.distribution_charts import cdf_points, evenly
from bench.load.report.gantt import Phase, Segment
from bench.load.report.sweep_charts import pareto_front
from bench.load.report.timeline import choose_rows, moved_row, timeline_row
from tests.bench.load.report_data import NUM_SLOTS, made_result, make_run
from tests.bench.load.report_page import check


def test_the_page_stays_small_however_many_requests_there_were() -> None:
    run = make_run(20.0, 4000, 1, fail_every=10)
    page = render_report([ReportRun(made_result(), run)])
    charts = check(page)
    assert len(page.encode()) < 600_000
    timeline = next(chart for chart in charts if chart.get("aria-label") == "Timeline of requests")
    assert len(timeline.findall("g")) == 200
    assert "200 of 3,900 drawn" in page


def test_failed_requests_come_first_when_rows_are_few() -> None:
    records = make_run(5.0, 1000, 1, fail_every=20).records
    rows = choose_rows(records, 100)
    assert len(rows) == 100
    assert sum(row.status is not Status.OK for row in rows) == 50
    assert [row.scheduled_s for row in rows] == sorted(row.scheduled_s for row in rows)
    assert choose_rows(records, 2000) == sorted(records, key=lambda r: r.scheduled_s)
    for record in records:
        record.status = Status.TIMEOUT
    assert len(choose_rows(records, 100)) == 100


@given(st.lists(st.floats(0, 1e6), max_size=900), st.integers(8, 400))
@settings(deadline=None)
def test_a_cumulative_curve_is_bounded_rises_and_keeps_its_ends(values: list[float], limit: int) -> None:
    points = cdf_points(np.array(values), limit)
    assert len(points) <= limit
    assert points == sorted(points)
    if values:
        assert points[0][0] == min(values)
        assert points[-1] == (max(values), 100.0)
        assert all(sum(v <= x for v in values) * 100 / len(values) >= y - 1e-9 for x, y in points)


@given(st.lists(st.integers(), max_size=50), st.integers(0, 60))
def test_evenly_keeps_order_and_ends(items: list[int], limit: int) -> None:
    chosen = evenly(list(enumerate(items)), limit)
    assert len(chosen) == min(limit, len(items))
    assert chosen == sorted(set(chosen))
    if items and limit >= 2:
        assert (chosen[0][0], chosen[-1][0]) == (0, len(items) - 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_front_holds_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    beaten = {p for p in points if any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
    assert set(pareto_front(points)) == set(points) - beaten


# Rows of the timeline


def test_the_servers_account_is_laid_out_from_the_send_and_cut_at_the_end() -> None:
    record = RequestRecord(
        index=0,
        scheduled_s=10.0,
        status=Status.OK,
        sent_s=10.25,
        chunk_times_s=[11.0, 12.0],
        end_s=12.0,
        timings={
            "queue_ms": 250.0,
            "prefill_ms": 500.0,
            "kv_transfer_ms": 125.0,
            "decode_ms": 9000.0,
            "ttft_ms": 1.0,
        },
    )
    row = timeline_row(record)
    assert row.segments == (
        Segment(10.0, 10.25, Phase.LAG),
        Segment(10.25, 10.5, Phase.QUEUE),
        Segment(10.5, 11.0, Phase.PREFILL),
        Segment(11.0, 11.125, Phase.TRANSFER),
        Segment(11.125, 12.0, Phase.DECODE),
    )
    assert (row.first_token, row.failed_at) == (11.0, None)
    moved = moved_row(row, 10.0)
    assert (moved.segments[0], moved.first_token) == (Segment(0.0, 0.25, Phase.LAG), 1.0)


def test_a_request_that_was_never_sent_is_a_cross_at_its_scheduled_time() -> None:
    row = timeline_row(
        RequestRecord(index=3, scheduled_s=4.0, status=Status.SKIPPED, error="an earlier turn failed")
    )
    assert (row.segments, row.failed_at) == ((), 4.0)
    assert "an earlier turn failed" in row.tip


def test_running_never_exceeds_the_servers_slots_in_the_chart() -> None:
    page = render_report([ReportRun(made_result(), make_run(20.0, 200, 1))])
    running = [float(value) for value in re.findall(r"s: ([\d.]+) running", page)]
    assert running
    assert 0 < max(running) <= NUM_SLOTS
