"""The report: one page that is well-formed, safe, complete and bounded, whatever the results hold."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.metrics import summarize
from bench.load.plan import Arrival, Plan
from bench.load.records import RequestRecord, RunRecord, Status
from bench.load.report import ReportRun, ReportSearch, render_report
from bench.load.report.distribution_charts import cdf_points, evenly, itls_ms, ttfts_ms
from bench.load.report.gantt import Phase, Segment
from bench.load.report.overview import date_text, page_title
from bench.load.report.sweep import knee, sweeps
from bench.load.report.sweep_charts import pareto_front
from bench.load.report.timeline import choose_rows, moved_row, timeline_row
from bench.load.report.values import Load, run_names, target_name
from bench.load.result import build_result
from bench.load.search import GoodputSearch, to_dict
from bench.load.search_values import ProbeOutcome, SearchSettings
from bench.load.slo import parse_slos
from bench.load.window import Window
from tests.bench.load.report_data import NUM_SLOTS, made_result, make_run

HOSTILE = "</title></svg><script>alert(1)</script><img src=http://x onerror=y>\"'&\x00\ud800"
VOID = {"meta", "line", "path", "rect", "circle", "polygon"}


class Nesting(HTMLParser):
    """Fails on a tag that closes what is not open; keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check(page: str) -> list[ET.Element]:
    """Every rule each page keeps; its charts."""
    page.encode()
    reader = Nesting()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    for name, attributes in reader.tags:
        assert name not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert all(not key.startswith("on") for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert [name for name, _ in reader.tags].count("script") == 1
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for _, attributes in reader.tags if "href" in attributes}
    assert targets == {f"#{one}" for one in ids}
    charts = [ET.fromstring(chart) for chart in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]
    for chart in charts:
        assert chart.get("aria-label")
        assert chart.get("role") in ("img", "group")
        for node in chart.iter():
            for key in ("x", "y", "x1", "y1", "cx", "cy", "width", "height", "d", "points"):
                assert re.fullmatch(r"[-0-9. ,MLZ]*", node.get(key, "")), (key, node.get(key))
    return charts


def titles(page: str) -> list[str]:
    return re.findall(r"<figcaption><b>(.*?)</b>", page)


def left_out(page: str) -> dict[str, str]:
    return dict(re.findall(r"<li>([^<]*?): left out, (.*?)\.</li>", page))


def real_run(rate: float = 3.0, seed: int = 1, num: int = 60, **changes: Any) -> ReportRun:
    run = make_run(rate, num, seed, fail_every=changes.pop("fail_every", 9))
    arrival = changes.pop("arrival", Arrival(kind="poisson", seed=seed, rate=rate))
    window = changes.pop("window", Window())
    plan = Plan(
        endpoint="/v1/completions",
        shared_body={"model": "demo"},
        requests=(),
        arrival=arrival,
        workload={"kind": "lognormal", "input_tokens": "lognormal:mean=300"},
    )
    slos = parse_slos("ttft=250ms,tpot=40ms,gap=150ms")
    environment = {"backend": "baton", "num_cores": 2, "server": {"version": "1"}, "client": {"cpu": "x"}}
    return ReportRun({**build_result(plan, run, summarize(run, slos, window), environment), **changes}, run)


# One run


def test_one_run_has_its_charts_and_says_what_it_is() -> None:
    page = render_report([real_run()])
    check(page)
    assert "<h1>Load test, open loop: Poisson arrivals, 3 req/s</h1>" in page
    assert titles(page) == [
        "TTFT distribution",
        "ITL distribution",
        "Output tokens per second",
        "Requests running and waiting",
        "Timeline of requests",
        "Each request from its scheduled time",
        "Input length",
        "Output length",
    ]
    for error in ("no answer within 30 s", "HTTP 503: no capacity", "an earlier turn failed"):
        assert error in page
    for setting in ("arrival.seed", "environment.client.cpu", "server.version", "slos_ms.ttft"):
        assert f"<td>{setting}</td>" in page


def test_every_chart_has_its_numbers_as_a_table() -> None:
    page = render_report([real_run()])
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert figures
    assert all("<summary>Data</summary>" in figure and "<td>" in figure for figure in figures)


def test_equal_input_gives_equal_bytes() -> None:
    assert render_report([real_run()]) == render_report([real_run()])


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    page = render_report([real_run()])
    found = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert found is not None
    policy = found[1].replace("&#x27;", "'")
    for kind in ("script", "style"):
        source = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        assert len(source) == 1
        digest = base64.b64encode(hashlib.sha256(source[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert 'style="' not in page


def test_only_requests_of_the_window_are_in_the_distributions() -> None:
    whole, part = real_run(num=80), real_run(num=80, window=Window(warmup_s=5.0))
    assert len(ttfts_ms(part)) < len(ttfts_ms(whole))
    for run in (whole, part):
        assert len(ttfts_ms(run)) == run.result["num_samples"]["ttft"]
        assert len(itls_ms(run)) == run.result["num_samples"]["itl"]
        assert np.percentile(itls_ms(run), 99) == pytest.approx(run.result["p99_itl_ms"])
    assert "measured window" in render_report([part])
    assert "measured window" not in render_report([whole])


def test_without_records_the_charts_of_requests_are_left_out_with_the_reason() -> None:
    page = render_report([ReportRun(made_result())])
    check(page)
    assert titles(page) == []
    assert left_out(page)["TTFT distribution"] == "no per-request records at hand"
    assert len(left_out(page)) == 7


def test_equal_lengths_are_told_instead_of_drawn() -> None:
    run = make_run(2.0, 10, 1)
    for record in run.records:
        record.input_tokens = 256
    page = render_report([ReportRun(made_result(), run)])
    assert left_out(page)["Input length"] == "all 10 offered requests have 256 tokens"


# What is not well


def test_an_invalid_run_says_so_with_every_reason() -> None:
    result = made_result(
        valid=False, invalid_reasons=["The client sent late.", "It was busy."], is_complete=False
    )
    page = render_report([ReportRun(result)])
    check(page)
    assert "INVALID" in page
    assert "The client sent late. It was busy." in page
    assert "INCOMPLETE" in page
    assert "The client kept up" not in page


def test_a_valid_run_says_how_well_the_client_kept_up() -> None:
    page = render_report([ReportRun(made_result())])
    assert "send lag p99 1.5 ms" in page.replace("1.50 ms", "1.5 ms")
    assert "INVALID" not in page


def test_a_result_that_does_not_speak_of_validity_is_not_called_valid() -> None:
    result = made_result()
    del result["valid"]
    page = render_report([ReportRun(result)])
    assert "Validity unknown" in page
    assert "The client kept up" not in page


def test_notes_and_cautions_are_told() -> None:
    page = render_report([ReportRun(made_result(notes=["client process 1 died"], cautions=["no usage"]))])
    assert "client process 1 died" in page
    assert "no usage" in page


def test_dates_are_told_as_people_write_them_and_others_stay() -> None:
    assert date_text("20261128-013000") == "2026-11-28 01:30:00 UTC"
    assert date_text("yesterday") == "yesterday"


def test_no_runs_at_all() -> None:
    page = render_report([])
    check(page)
    assert "no runs" in page


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_run_in_which_everything_failed(status: Status) -> None:
    sent = None if status is Status.SKIPPED else 0.5
    records = [
        RequestRecord(
            index=i, scheduled_s=0.4, status=status, sent_s=sent, end_s=sent and 0.9, error="it broke"
        )
        for i in range(3)
    ]
    run = RunRecord(records=records, clients=[], start_unix_s=0, wall_s=1.0, is_complete=False)
    plan = Plan(
        endpoint="/v1/completions",
        shared_body={},
        requests=(),
        arrival=Arrival(kind="burst", seed=1),
        workload={},
    )
    result = build_result(plan, run, summarize(run, parse_slos("ttft=1s")), {})
    page = render_report([ReportRun(result, run)])
    check(page)
    assert "it broke" in page
    assert "all requests at once" in page
    assert "Timeline of requests" in titles(page)
    assert left_out(page)["TTFT distribution"].startswith("there are no measured requests")


def test_a_run_without_a_single_request() -> None:
    run = RunRecord(records=[], clients=[], start_unix_s=0, wall_s=0, is_complete=True)
    check(render_report([ReportRun(made_result(), run)]))


def test_a_request_in_flight_when_the_run_broke_off_is_drawn_to_its_last_chunk() -> None:
    record = RequestRecord(
        index=0, scheduled_s=1.0, status=Status.CANCELLED, sent_s=1.0, chunk_times_s=[2.0, 3.0], end_s=None
    )
    row = timeline_row(record)
    assert row.segments == (Segment(1.0, 2.0, Phase.WAIT), Segment(2.0, 3.0, Phase.STREAM))
    assert row.failed_at == 3.0
    run = RunRecord(records=[record], clients=[], start_unix_s=0, wall_s=3, is_complete=False)
    check(render_report([ReportRun(made_result(), run)]))


# Untrusted text


def test_hostile_names_errors_and_notes_stay_text() -> None:
    run = make_run(2.0, 12, 1, fail_every=2)
    for record in run.records:
        record.error = record.error and HOSTILE
        record.timings = {"queue_ms": HOSTILE, HOSTILE: 1.0}
    changes = {
        "label": HOSTILE,
        "model_id": HOSTILE,
        "notes": [HOSTILE],
        "invalid_reasons": [HOSTILE],
        "valid": False,
        "failures": {HOSTILE: 2},
        "slo_attainment_by_metric": {HOSTILE: 0.5, "ttft": 0.4},
        "slos_ms": {HOSTILE: 3.0},
        "environment": {HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]},
        "date": HOSTILE,
    }
    searches = [
        ReportSearch(
            HOSTILE,
            {
                "probes": [{"rate": 1.0, "attainment": 0.5}],
                "answers": [{"rate": 1.0, "target": 0.9, "notes": [HOSTILE]}],
            },
        )
    ]
    arrival = {"kind": HOSTILE, "seed": 1, "rate": 2.0}
    runs = [ReportRun(made_result(**changes, arrival={**arrival, "rate": rate}), run) for rate in (2.0, 3.0)]
    for page in (render_report(runs[:1], searches), render_report(runs, searches)):
        check(page)
        assert "alert(1)</script>" not in page
        assert "&lt;script&gt;alert(1)" in page


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
    )


@settings(max_examples=30, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(sorted(made_result())), json_values(), max_size=8))
def test_results_with_values_of_any_kind_make_a_page(changes: dict[str, Any]) -> None:
    check(render_report([ReportRun({**made_result(), **changes}), ReportRun(made_result())]))


@settings(max_examples=20, deadline=None)
@given(outcome=st.dictionaries(st.sampled_from(["probes", "answers", "settings"]), json_values(), max_size=3))
def test_searches_with_values_of_any_kind_make_a_page(outcome: dict[str, Any]) -> None:
    check(render_report([], [ReportSearch("t", outcome)]))


def test_a_result_of_vllm_itself_is_read() -> None:
    result = {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "m",
        "num_prompts": 10,
        "request_rate": "inf",
        "max_concurrency": 8,
        "median_ttft_ms": 12.0,
        "p99_ttft_ms": 30.0,
        "output_throughput": 100.0,
    }
    page = render_report([ReportRun(result)])
    check(page)
    assert "closed loop: 8 requests in flight" in page
    assert ">12 ms<" in page


# Several runs


def sweep(rates: tuple[float, ...], shares: tuple[float, ...], **changes: Any) -> list[ReportRun]:
    return [
        ReportRun(
            made_result(
                arrival={"kind": "poisson", "seed": seed, "rate": rate},
                slo_attainment=share,
                request_goodput=rate * share,
                **changes,
            )
        )
        for rate, share in zip(rates, shares, strict=True)
        for seed in (1, 2)
    ]


def test_a_sweep_has_the_charts_over_rate() -> None:
    page = render_report(sweep((1, 2, 4, 8), (1.0, 0.98, 0.93, 0.2)))
    check(page)
    for title in (
        "TTFT against offered rate",
        "Worst gap against offered rate",
        "End-to-end latency against offered rate",
        "Goodput against offered rate",
        "SLO attainment against offered rate",
        "Throughput against speed per user",
    ):
        assert title in titles(page)
    assert "Load test, open loop: Poisson arrivals, 1 to 8 req/s" in page
    assert ">knee 4<" in page
    assert {">90 %<", ">99 %<"} <= set(re.findall(r">\d\d %<", page))


def test_runs_at_one_load_leave_the_charts_over_rate_out() -> None:
    page = render_report(sweep((2,), (0.9,)))
    check(page)
    assert left_out(page)["Goodput against offered rate"].startswith("the runs are at one load only")


def test_runs_without_slos_say_so() -> None:
    nothing = {"request_goodput": None, "slo_attainment": None, "slo_attainment_by_metric": {}, "slos_ms": {}}
    runs = [ReportRun({**run.result, **nothing}) for run in sweep((1, 2), (1, 1))]
    page = render_report(runs)
    check(page)
    assert left_out(page)["SLO attainment against offered rate"] == "no SLOs were set"
    assert "No SLOs were set: requests completed per second stand in for goodput" in page


def test_a_closed_loop_sweep_is_over_requests_in_flight() -> None:
    runs = [
        ReportRun(made_result(arrival={"kind": "closed-loop", "seed": 1, "rate": None, "closed_loop": n}))
        for n in (1, 8, 32)
    ]
    page = render_report(runs)
    check(page)
    assert "Load test, closed loop: 1 to 32 requests in flight" in page
    assert "TTFT against requests in flight" in titles(page)
    assert not any("offered rate" in title for title in titles(page))


def test_open_and_closed_loop_together_are_named_both() -> None:
    closed = made_result(arrival={"kind": "closed-loop", "closed_loop": 4})
    assert page_title([ReportRun(made_result()), ReportRun(closed)]).startswith(
        "Load test, open and closed loop"
    )


def test_a_comparison_has_ratios_to_the_first_target_at_the_same_load() -> None:
    first = sweep((1, 2), (0.9, 0.8), label="ours", output_throughput=50.0)
    second = sweep((1, 2), (0.9, 0.8), label="theirs", output_throughput=75.0)
    page = render_report([*first, *second])
    check(page)
    assert page.count("×1.50") == 4
    assert "ratio to ours at the same load" in page
    assert "SLO attainment against offered rate: all SLOs" in titles(page)


def test_several_runs_are_told_one_by_one() -> None:
    runs = [real_run(rate=rate, num=30) for rate in (2.0, 5.0)]
    page = render_report(runs)
    check(page)
    assert re.findall(r'<details class="run"><summary>(.*?)</summary>', page) == ["2 req/s", "5 req/s"]
    assert "Different between runs" in page


def test_names_tell_runs_apart() -> None:
    runs = sweep((1, 2), (1, 1))
    assert run_names(runs) == ["1 req/s · seed 1", "1 req/s · seed 2", "2 req/s · seed 1", "2 req/s · seed 2"]
    assert run_names([runs[0], runs[0]]) == ["1 req/s · seed 1 (1)", "1 req/s · seed 1 (2)"]


def test_equal_names_at_different_addresses_are_different_targets() -> None:
    results = [made_result(environment={"url": f"http://127.0.0.1:{port}"}) for port in (1, 2)]
    assert target_name(results[0]) == "baton · demo · 127.0.0.1:1"
    assert target_name(results[0]) != target_name(results[1])


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1.0, 0.95, 0.9, 0.1), 4),
        ((1.0, 0.5, 0.95, 0.1), 1),
        ((0.8, 0.95, 0.9, 0.1), None),
        ((1, 1, 1, 1), 8),
    ],
)
def test_the_knee_is_the_last_load_before_the_first_that_fails(shares: Any, expected: float | None) -> None:
    (one,) = sweeps(sweep((1, 2, 4, 8), shares), Load.RATE)
    assert knee(one, 0.9) == expected


def test_a_search_shows_its_answers_and_its_probes() -> None:
    search = GoodputSearch(SearchSettings(start_rate=2.0))
    while (probe := search.next()) is not None:
        share = 1.0 if probe.rate < 4 + probe.seed / 10 else 0.2
        search.report(probe, ProbeOutcome(attainment=share, num_offered=100))
    outcome = to_dict(search)
    page = render_report([], [ReportSearch("baton", outcome)])
    charts = check(page)
    assert "≥ 90 % inside all SLOs" in page
    assert "95 % interval" in page
    dots = [node for chart in charts for node in chart.iter() if node.get("class", "").startswith("dot")]
    assert len(dots) == len(outcome["probes"])


def test_a_search_without_an_answer_says_so() -> None:
    outcome = {"answers": [{"target": 0.9, "rate": 0.0, "seeds": []}], "probes": []}
    page = render_report([], [ReportSearch("baton", outcome)])
    check(page)
    assert "no rate passed" in page
    assert left_out(page)["Probes of the search"] == "no probe measured anything"


# Caps and choices


def test_the_page_stays_small_however_many_requests_there_were() -> None:
    run = make_run(20.0, 4000, 1, fail_every=10)
    page = render_report([ReportRun(made_result(), run)])
    charts = check(page)
    assert len(page.encode()) < 600_000
    timeline = next(chart for chart in charts if chart.get("aria-label") == "Timeline of requests")
    assert len(timeline.findall("g")) == 200
    assert "200 of 4,000 drawn" in page


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
