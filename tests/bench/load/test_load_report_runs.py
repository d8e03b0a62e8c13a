"""The page of several runs: sweeps, comparisons and searches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import ProbeOutcome, SearchSettings
from bench.load.report import ReportRun, ReportSearch, render_report
from bench.load.report.goodput_charts import offered_line
from bench.load.report.overview import page_title
from bench.load.report.sweep import knee, sweeps
from bench.load.report.targets import tell_apart
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


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"valid": False, "invalid_reasons": ["It lagged."]}, "INVALID"),
        ({"is_complete": False}, "INCOMPLETE"),
    ],
)
def test_runs_in_doubt_are_marked_in_charts_and_have_no_ratio(change: dict[str, Any], word: str) -> None:
    first = sweep((1, 2), (0.9, 0.8), label="ours", output_throughput=50.0)
    second = sweep((1, 2), (0.9, 0.8), label="theirs", output_throughput=75.0)
    second[0] = ReportRun({**second[0].result, **change})
    page = render_report([*first, *second])
    charts = check(page)
    assert page.count("×1.50") == 3
    assert f'<span class="ratio">{word}</span>' in page
    assert f"<strong>{word} (1 of 8 runs)" in page
    assert page.count(f'<em class="doubt">1 of 8 runs {word}</em>') == len(charts)
    assert f"{word} run" in page  # at its own point and in its own details
    held_against = [ReportRun({**run.result, **change}) for run in first]
    assert "×1.50" not in render_report([*held_against, *second[1:]])


def test_a_run_in_doubt_has_no_part_in_the_knee() -> None:
    runs = sweep((1, 2, 4), (1.0, 0.95, 0.1))
    runs += [ReportRun({**run.result, "valid": False, "slo_attainment": 0.0}) for run in runs[:2]]
    (one,) = sweeps(runs, Load.RATE)
    assert knee(one, 0.9) == 2


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


# What is no sweep


def test_runs_of_different_work_are_not_joined_and_have_no_knee() -> None:
    runs = [
        ReportRun(
            made_result(
                workload={"kind": "fixed", "output": {"tokens": tokens}, "salt": tokens},
                arrival={"kind": "poisson", "seed": 1, "rate": rate},
            )
        )
        for tokens, rate in ((64, 1.0), (16, 2.0))
    ]
    page = render_report(runs)
    check(page)
    assert "These runs are not one sweep" in page
    assert "workload.output.tokens: 64 → 16" in page
    assert ">knee" not in page
    assert "Goodput against offered rate" not in titles(page)
    assert "ratio to" not in page


@pytest.mark.parametrize(
    "change", [{"model_id": "other", "label": "l"}, {"slos_ms": {}}, {"endpoint": "/v1/x"}]
)
def test_model_slos_and_endpoint_tell_targets_apart(change: dict[str, Any]) -> None:
    base = made_result(label="l")
    assert [run.target for run in tell_apart([ReportRun(base), ReportRun({**base, **change})])] == [
        "l",
        "l #2",
    ]
    again = {**base, "workload": {"salt": 5, "seed": 3, "num_requests": 9}}
    assert [run.target for run in tell_apart([ReportRun(base), ReportRun(again)])] == ["l", "l"]


def test_runs_are_told_in_order_of_their_load() -> None:
    page = render_report([real_run(rate=rate, num=10) for rate in (16.0, 2.0)])
    assert re.findall(r'<details class="run"><summary>(.*?)</summary>', page) == ["2 req/s", "16 req/s"]


def test_points_stand_at_the_rate_really_offered_and_goodput_is_below_the_offered_line() -> None:
    runs = [
        ReportRun(
            made_result(
                arrival={"kind": "poisson", "seed": 1, "rate": rate},
                offered_request_rate=rate * 1.2,
                request_goodput=rate * 1.25,
                num_prompts=100,
                duration=100 / (rate * 1.25),
            )
        )
        for rate in (2.0, 4.0)
    ]
    page = render_report(runs)
    check(page)
    assert "at 2 req/s nominal, 2.40 offered" in page
    (one,) = sweeps(runs, Load.RATE)
    assert [one.mean_place(load) for load in one.loads()] == pytest.approx([2.4, 4.8])
    offered = dict(offered_line([one]))
    assert all(offered[one.place(at, run)] >= run.result["request_goodput"] for at, run in one.points)


# A search


def outcome_of(*probes: tuple[float, float, bool], **changes: Any) -> dict[str, Any]:
    search = GoodputSearch(SearchSettings(start_rate=probes[0][0], seeds=(0,), targets=(0.9,)))
    for rate, share, valid in probes:
        probe = search.next()
        assert probe is not None
        assert probe.rate == rate
        search.report(probe, ProbeOutcome(attainment=share, num_offered=100, valid=valid))
    return {**to_dict(search), "is_complete": True, **changes}


def test_an_invalid_probe_that_was_repeated_does_not_condemn_the_page() -> None:
    outcome = outcome_of((2.0, 1.0, False), (2.0, 1.0, True), (4.0, 0.1, True))
    runs = [ReportRun(made_result(valid=valid), is_probe=True) for valid in (False, True, True)]
    page = render_report(runs, [ReportSearch("http://x", outcome)])
    check(page)
    assert "<h1>Search for the highest good rate: Poisson arrivals" in page
    assert "INVALID:" not in page
    assert "1 probe was invalid. No answer rests on it." in page
    assert ">knee" not in page


@pytest.mark.parametrize(
    ("changes", "told", "mark"),
    [
        ({"valid": False, "invalid_reasons": ["it lagged"]}, "INVALID: these figures", "INVALID run"),
        ({"is_complete": False}, "INCOMPLETE: these figures", "INCOMPLETE run"),
        ({"valid": None}, "Validity unknown", None),
    ],
)
def test_a_run_beside_a_search_is_judged_as_on_a_page_of_its_own(
    changes: dict[str, Any], told: str, mark: str | None
) -> None:
    """The search was sound, so nothing but the run itself says what is wrong."""
    outcome = outcome_of((2.0, 1.0, True), (4.0, 0.1, True))
    outcome["answers"][0]["is_converged"] = True
    probes = [ReportRun(made_result(), is_probe=True), ReportRun(made_result(), is_probe=True)]
    page = render_report([*probes, ReportRun(made_result(**changes))], [ReportSearch("x", outcome)])
    check(page)
    assert "Valid. The client" not in page
    assert told in page
    assert mark is None or f"<title>{mark}" in page
    sound = render_report([*probes, ReportRun(made_result())], [ReportSearch("x", outcome)])
    assert "Valid. The client" in sound


def test_probes_of_several_seeds_are_points_and_are_counted_apart_from_runs() -> None:
    outcome = outcome_of((2.0, 1.0, True), (4.0, 0.1, True))
    rates = ((2.0, 1), (4.0, 1), (3.0, 2))
    runs = [
        ReportRun(made_result(arrival={"kind": "poisson", "seed": seed, "rate": rate}), is_probe=rate != 3.0)
        for rate, seed in rates
    ]
    page = render_report(runs, [ReportSearch("http://x", outcome)])
    check(page)
    assert "No line: the seeds differ from rate to rate." in page
    assert "2 probes · 1 run ·" in page
    assert "<h2>Probes and runs</h2>" in page
    alone = render_report(runs[:2], [ReportSearch("http://x", outcome)])
    assert "No line" not in alone
    assert "2 probes ·" in alone
    assert "<h2>Probes</h2>" in alone


def test_a_sweep_joins_loads_that_have_the_same_seeds() -> None:
    (whole,) = sweeps(tell_apart(sweep((1, 2), (1.0, 0.9))), Load.RATE)
    assert whole.is_joined
    (ragged,) = sweeps(tell_apart(sweep((1, 2), (1.0, 0.9))[:3]), Load.RATE)
    assert not ragged.is_joined


def test_an_answer_that_rests_on_an_invalid_probe_is_invalid() -> None:
    outcome = outcome_of((2.0, 1.0, True), (4.0, 1.0, False), (4.0, 1.0, False))
    page = render_report([ReportRun(made_result())], [ReportSearch("http://x", outcome)])
    check(page)
    assert "INVALID: an answer rests on probes" in page
    assert "4 req/s, seed 0" in page
    assert "≥ 2 req/s" in page


def test_an_interrupted_search_says_so_and_how_many_seeds_it_knows() -> None:
    search = GoodputSearch(SearchSettings(start_rate=2.0, targets=(0.9,)))
    probe = search.next()
    assert probe is not None
    search.report(probe, ProbeOutcome(attainment=1.0, num_offered=10))
    page = render_report([], [ReportSearch("x", {**to_dict(search), "is_complete": False})])
    check(page)
    assert "INCOMPLETE" in page
    assert "1 of 3 seeds, not converged" in page
    assert "Not searched, so in no figure: seeds 1, 2." in page


def test_a_search_that_was_cut_short_or_found_no_answer_says_why() -> None:
    outcome = outcome_of((2.0, 1.0, True), incomplete_reasons=["The server went."], is_complete=False)
    page = render_report([], [ReportSearch("x", outcome)])
    assert "x: the search was cut short. The server went." in page
    page = render_report([], [ReportSearch("x", outcome_of((2.0, 1.0, True)))])
    assert "x: no answer yet at 90%" in page
    ended = outcome_of((2.0, 1.0, True), (4.0, 0.1, True), (2.8284271247461903, 0.1, True))
    for answer in ended["answers"]:
        answer["is_converged"] = True
    assert "INCOMPLETE" not in render_report([], [ReportSearch("x", ended)])


def test_cautions_stand_at_the_top_of_runs_and_of_searches() -> None:
    run = ReportRun(made_result(cautions=["The server went away after 3 s."]))
    page = render_report([run])
    check(page)
    assert "<strong>Caution</strong><ul><li>" in page
    assert page.index("The server went away after 3 s.") < page.index("<main>")
    probe = ReportRun(run.result, is_probe=True)
    page = render_report([probe] * 9, [ReportSearch("x", outcome_of((2.0, 1.0, True), (4.0, 0.1, True)))])
    check(page)
    assert page.index("The server went away after 3 s.") < page.index("<main>")
    assert "and 3 more, in the results of the probes" in page


def test_a_search_is_named_by_its_label_and_invalid_probes_lie_below_valid_ones() -> None:
    outcome = outcome_of((2.0, 1.0, False), (2.0, 1.0, True), (4.0, 0.1, True), label="ours", backend="b")
    page = render_report([], [ReportSearch("http://127.0.0.1:1", outcome)])
    (chart,) = check(page)
    assert "http://127.0.0.1:1" not in page
    assert [node.text for node in chart.iter() if node.get("class") == "key"] == ["ours, invalid", "ours"]
    dots = [node.tag for node in chart.iter() if node.get("class", "").startswith("dot")]
    assert dots.index("polygon") < dots.index("circle", 1)  # keys come last


def test_a_band_ends_inside_the_plot() -> None:
    answer = {"target": 0.9, "rate": 2.0, "seeds": [], "ci_low": 1.0, "ci_high": 90.0}
    outcome = {"answers": [answer], "probes": [{"rate": 2.0, "seed": 0, "attainment": 1.0, "num_offered": 5}]}
    (chart,) = check(render_report([], [ReportSearch("x", outcome)]))
    (band,) = [node for node in chart.iter() if node.get("class") == "band"]
    ticks = [
        float(node.text or "")
        for node in chart.iter()
        if node.get("class") == "tick" and "," not in (node.text or "")
    ]
    assert max(ticks) >= 90
    assert float(band.get("x", "")) + float(band.get("width", "")) < 1160


# Runs from files


def test_a_run_is_called_by_its_label_else_by_its_file() -> None:
    bad = made_result(valid=False, invalid_reasons=["It lagged."], label=None)
    page = render_report([ReportRun(bad, file="before")])
    check(page)
    assert "before · 2 req/s: It lagged." in page
    assert "It lagged." in render_report([ReportRun({**bad, "label": "tuned"}, file="before")])
    assert run_names([ReportRun({**bad, "label": "tuned"}, file="before")]) == ["tuned · 2 req/s"]
    both = [ReportRun(bad, file="before"), ReportRun({**bad, "valid": True}, file="after")]
    assert run_names(both) == ["before · 2 req/s", "after · 2 req/s"]
    page = render_report(both)
    check(page)
    assert '<th scope="col">run</th>' in page
    assert "<td>after</td>" in page
    assert ReportSearch("there", {"backend": "openai"}, file="search").name == "search"
