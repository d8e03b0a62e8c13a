"""The pure parts of the report: what is drawn of very many requests, and how a timeline row is laid out."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.records import RequestRecord, Status
from bench.load.report import ReportRun, render_report
from bench.load.report.distribution_charts import (
    FLOOR_MS,
    MAX_STEPS,
    cdf_line,
    cdf_points,
    evenly,
    floor_ms,
)
from bench.load.report.frame import CHAR_PX, Axis, make_frame
from bench.load.report.gantt import Phase, Segment
from bench.load.report.scales import tick_label
from bench.load.report.sweep_charts import pareto_front
from bench.load.report.timeline import choose_rows, moved_row, timeline_row
from tests.bench.load.report_data import NUM_SLOTS, made_result, make_run
from tests.bench.load.report_page import check, titles


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


# Distributions and axes


def test_few_values_are_drawn_as_the_staircase_they_are() -> None:
    line = cdf_line(np.array([30.0, 10.0]))
    assert line == [(10.0, 0.0), (10.0, 50.0), (30.0, 50.0), (30.0, 100.0)]
    many = np.linspace(1, 2, MAX_STEPS + 1)
    assert cdf_line(many) == cdf_points(many)


def test_a_few_tiny_gaps_do_not_stretch_the_log_axis() -> None:
    gaps = np.array([0.002] * 2 + [10.0] * 398)
    assert floor_ms([gaps]) == 10.0
    bursts = np.array([0.002] * 150 + [10.0] * 250)
    assert floor_ms([bursts]) == FLOOR_MS
    assert floor_ms([np.array([0.02, 0.03, 0.02])]) == 0.02
    assert floor_ms([np.array([50.0, 51.0, 230.0])]) == 50.0
    run = make_run(5.0, 30, 1)
    for record in run.records[:2]:
        record.chunk_times_s[1] = record.chunk_times_s[0] + 2e-6
    page = render_report([ReportRun(made_result(), run)])
    check(page)
    assert re.search(r"\d+ of [\d,]+ lie below [\d.]+ ms and are drawn there", page)


def test_long_labels_of_the_y_axis_have_room() -> None:
    frame = make_frame(Axis("x"), Axis("y", lo=0.0), [0, 1], [0, 900_000])
    longest = max(len(tick_label(tick)) for tick in frame.y.ticks(5))
    assert longest >= 7
    assert frame.left - 8 - longest * CHAR_PX >= 0
    assert make_frame(Axis("x"), Axis("y"), [0, 1], [0, 1]).left < frame.left


# Never sent, turns, caches


def test_never_sent_requests_are_told_apart_and_do_not_stretch_the_timeline() -> None:
    run = make_run(5.0, 20, 1)
    late = RequestRecord(index=20, scheduled_s=900.0, status=Status.SKIPPED, error="the run was interrupted")
    run.records.append(late)
    result = made_result(failed=3, failures={"timeout": 2, "skipped": 1})
    page = render_report([ReportRun(result, run)])
    charts = check(page)
    timeline = next(chart for chart in charts if chart.get("aria-label") == "Timeline of requests")
    ticks = [float(node.text or "") for node in timeline.iter() if node.get("class") == "tick"]
    assert max(ticks) < 100
    assert "1 more were never sent and have no row" in page
    assert '<dt>Failed</dt><dd><span class="value">2</span>' in page
    assert '<dt>Never sent</dt><dd><span class="value">1</span>' in page
    assert "<td>never sent</td><td>1</td>" in page


def test_a_chat_has_its_turns_and_cached_share() -> None:
    run = make_run(5.0, 30, 1)
    for record in run.records:
        record.session, record.turn = record.index // 3, record.index % 3
        record.input_tokens, record.cached_tokens = 100, 40 * record.turn
    page = render_report([ReportRun(made_result(total_cached_tokens=1200, total_input_tokens=3000), run)])
    check(page)
    assert {"TTFT by turn", "Cached share of the input by turn"} <= set(titles(page))
    assert "turn 3: 80 % cached" in page
    ticks = re.findall(r'class="tick" text-anchor="middle">(.*?)<', page.split("<b>TTFT by turn</b>")[1])
    assert ticks[:3] == ["1", "2", "3"]
    assert '<dt>Cached input</dt><dd><span class="value">40 %</span>' in page
    for record in run.records:
        record.cached_tokens = None
    page = render_report([ReportRun(made_result(), run)])
    assert "TTFT by turn" in titles(page)
    assert "Cached" not in page
    for record in run.records:
        record.session = None
    assert "TTFT by turn" not in titles(render_report([ReportRun(made_result(), run)]))
