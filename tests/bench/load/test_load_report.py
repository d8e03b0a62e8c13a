"""The page of one run: well-formed and complete, and honest where a run is not well."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import numpy as np
import pytest

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.window import Window
from bench.load.plan import Arrival, Plan
from bench.load.records import RequestRecord, RunRecord, Status
from bench.load.report import ReportRun, render_report
from bench.load.report.distribution_charts import itls_ms, ttfts_ms
from bench.load.report.gantt import Phase, Segment
from bench.load.report.overview import date_text
from bench.load.report.timeline import timeline_row
from bench.load.results.result import build_result
from tests.bench.load.report_data import made_result, make_run
from tests.bench.load.report_page import check, left_out, real_run, titles

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


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"valid": False, "invalid_reasons": ["It lagged."]}, "INVALID"),
        ({"is_complete": False}, "INCOMPLETE"),
    ],
)
def test_a_run_in_doubt_is_marked_above_all_and_at_each_of_its_charts(
    change: dict[str, Any], word: str
) -> None:
    page = render_report([ReportRun(made_result(**change), make_run(rate=4.0, num=40, seed=1))])
    charts = check(page)
    assert f"<title>{word} run: Load test" in page
    assert page.index(f"<strong>{word}") < page.index('class="lead"') < page.index("<svg")
    assert page.count(f'<em class="doubt">{word} run</em>') == len(charts) > 0
    good = render_report([ReportRun(made_result(), make_run(rate=4.0, num=40, seed=1))])
    assert 'class="doubt"' not in good
    assert "<title>Load test" in good


def test_an_incomplete_run_says_how_much_was_never_sent() -> None:
    page = render_report([ReportRun(made_result(is_complete=False, failures={"skipped": 30}))])
    assert "INCOMPLETE: these figures are of a part of the load." in page
    assert "before everything planned was offered: 30 of 100 requests were never sent." in page
    assert "Valid." not in page


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
    if status is Status.SKIPPED:
        assert left_out(page)["Timeline of requests"] == "none of 3 requests was sent"
        assert "Never sent: 3 requests" in page
        assert "No request that was sent failed" in page
    else:
        assert "Timeline of requests" in titles(page)
        assert "ever sent" not in page.split('id="words"')[0]
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
