"""The page of several runs: sweeps, comparisons and searches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import ProbeOutcome, SearchSettings
from bench.load.report import ReportRun, ReportSearch, render_report
from bench.load.report.overview import page_title
from bench.load.report.sweep import knee, sweeps
from bench.load.report.values import Load, run_names, target_name
from tests.bench.load.report_data import made_result
from tests.bench.load.report_page import check, left_out, real_run, titles


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
    assert left_out(page)["Goodput against offered rate"].startswith("each target ran at one load only")


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
