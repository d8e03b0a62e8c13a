"""What a terminal says of a result, and what plans leave out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.cli_session import Session
from bench.load.client.interrupts import StopSwitch
from bench.load.client.target import parse_target
from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.window import Window
from bench.load.plan import Arrival
from bench.load.plans import arrivals
from bench.load.plans.lengths import Fixed
from bench.load.plans.settings import PlanSettings, Synthetic
from bench.load.records import RequestRecord, RunRecord, Status
from bench.load.results.result import build_result
from bench.load.results.summary_text import summary_lines
from bench.load.results.workload_text import left_out, workload_cautions
from tests.bench.load.load_values import answer, plan_of, run_of, skipped


def answered(scheduled_s: float) -> RequestRecord:
    return answer(scheduled_s, [scheduled_s + 0.1, scheduled_s + 0.2])


def result_of(run: RunRecord, arrival: Arrival, **workload: Any) -> dict[str, Any]:
    plan = msgspec.structs.replace(plan_of(run, arrival), workload=workload)
    return build_result(plan, run, summarize(run, parse_slos("ttft=1s")), {})


def lines_of(run: RunRecord, arrival: Arrival, **workload: Any) -> str:
    return "\n".join(summary_lines(result_of(run, arrival, **workload)))


def test_rates_are_rounded_and_chats_are_no_requests() -> None:
    run = run_of([answered(float(second)) for second in range(5)])
    text = lines_of(run, arrivals.poisson(1.23456789, 4), kind="synthetic")
    assert "open loop, 1.235 req/s (poisson), seed 4" in text
    assert "offered                   1 req/s" in text
    chats = lines_of(run, arrivals.poisson(0.3, 4), kind="chat", num_arrivals=2, num_requests=5)
    assert "open loop, 0.3 chats/s (poisson), 2 chats of 5 requests, seed 4" in chats
    looped = lines_of(run, arrivals.closed_loop(2), kind="synthetic")
    assert "closed loop of 2, seed 0" in looped
    assert "req/s (closed" not in looped


def test_requests_never_sent_are_told_apart() -> None:
    run = run_of([answered(0.0), answered(1.0), *(skipped(float(second)) for second in (2, 3))])
    result = result_of(run, arrivals.poisson(1.0, 0))
    assert (result["num_prompts"], result["num_sent"]) == (4, 2)
    assert (result["slo_attainment"], result["slo_attainment_of_sent"]) == (0.5, 1.0)
    assert result["offered_request_rate"] == pytest.approx(1.0)  # what was sent: one gap of a second
    text = "\n".join(summary_lines(result))
    assert "4 planned, 2 sent, 2 ok, 2 failed" in text
    assert "50.0% of all offered, 100.0% of those sent" in text


@given(st.lists(st.floats(0, 1000), min_size=0, max_size=20), st.floats(0, 2))
def test_the_offered_rate_is_that_of_the_gaps(moments_s: list[float], life_s: float) -> None:
    """Above it by the boundary, n requests against n - 1 gaps, throughput may be, and never by more."""
    run = run_of([answer(at_s, [at_s + life_s]) for at_s in moments_s])
    result = result_of(run, arrivals.poisson(1.0, 0))
    num, span_s = len(moments_s), max(moments_s, default=0.0) - min(moments_s, default=0.0)
    offered = result["offered_request_rate"]
    if num < 2 or span_s == 0:
        assert offered is None
        return
    assert offered == pytest.approx((num - 1) / span_s)
    assert result["request_throughput"] <= offered * num / (num - 1) * (1 + 1e-9)


def test_the_offered_rate_is_that_which_was_asked_for() -> None:
    run = run_of([answered(i / 5) for i in range(10)])
    text = lines_of(run, arrivals.constant(5.0), kind="synthetic")
    assert "open loop, 5 req/s (constant)" in text
    assert "offered                   5 req/s" in text


def test_where_no_request_was_due_in_the_window_it_says_so() -> None:
    unsent = answer(3.0, [], status=Status.CLIENT)
    unsent.sent_s = None
    run = run_of([answered(0.0), answered(1.0), unsent])
    for warmup_s, words in ((10.0, "no request was due in the window"), (2.0, "nothing that was due in the")):
        summary = summarize(run, (), Window(warmup_s=warmup_s))
        [client] = [
            one for one in summary_lines(build_result(plan_of(run), run, summary, {})) if "CPU" in one
        ]
        assert words in client


def test_a_run_without_samples_says_so_in_words() -> None:
    run = run_of([skipped(0.0)])
    run.clients = []
    text = lines_of(run, arrivals.poisson(1.0, 0))
    assert "nothing was sent, CPU not measured" in text


def test_latencies_come_with_their_percentiles_and_counts() -> None:
    run = run_of([answered(float(second)) for second in range(3)])
    result = build_result(plan_of(run), run, summarize(run, (), percentiles=(50.0, 99.9)), {})
    [header] = [line for line in summary_lines(result) if line.startswith("latency")]
    assert header.split() == ["latency", "(ms)", "mean", "p50", "p99.9", "n"]
    [ttft] = [line for line in summary_lines(result) if line.strip().startswith("TTFT")]
    assert ttft.split()[-1] == "3"


def test_cached_tokens_are_told_where_a_server_reports_them() -> None:
    run = run_of([answered(0.0)])
    assert "cached" not in lines_of(run, arrivals.poisson(1.0, 0))
    for record in run.records:
        record.input_tokens, record.cached_tokens = 100, 25
    assert "25 tokens, 25.0% of the input" in lines_of(run, arrivals.poisson(1.0, 0))


def test_what_was_left_out_is_one_line_and_much_of_it_a_caution() -> None:
    few = {"num_rows_file": 1005, "num_rows_empty": 5, "num_rows_oversize_skipped": 10}
    assert left_out(few) == (
        "10 of 1000 trace rows skipped (too long for the model), 5 trace rows without tokens dropped"
    )
    assert workload_cautions(few) == []
    [caution] = workload_cautions(few | {"num_rows_oversize_skipped": 11})
    assert "11 of 1000 trace rows (1.1%)" in caution
    assert left_out({"num_rows_oversize_clamped": 3}) == "3 trace rows shortened (too long for the model)"
    assert left_out({"num_rows_file": 9, "num_oversize_clamped": 0}) is None
    run = run_of([answered(0.0)])
    assert "10 of 1000 trace rows skipped" in lines_of(run, arrivals.poisson(1.0, 0), **few)
    result = result_of(run, arrivals.poisson(1.0, 0), **few | {"num_rows_oversize_skipped": 500})
    assert any("500 of 1000" in caution for caution in result["cautions"])
    assert any(line.startswith("caution: 500 of 1000") for line in summary_lines(result))


@pytest.mark.parametrize(("tokens", "is_small"), [(512.0, False), (64.0, False), (51.2, True)])
def test_small_scaled_blocks_are_a_caution(tokens: float, is_small: bool) -> None:
    cautions = workload_cautions({"block_tokens_scaled": tokens})
    assert bool(cautions) is is_small
    assert all("51.2 tokens after scaling" in caution for caution in cautions)


@pytest.mark.parametrize(
    ("has_timings", "given", "sent"),
    [(True, {}, {"timings": True}), (True, {"timings": False}, {"timings": False}), (False, {}, {})],
)
def test_baton_is_asked_for_its_timings(
    has_timings: bool, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    settings = PlanSettings(
        model="",
        arrival=arrivals.poisson(1.0, 0),
        workload=Synthetic(input=Fixed(1), output=Fixed(1)),
        extra_body=given,
    )
    session = Session(
        target=parse_target("http://localhost:1"),
        model="one",
        max_model_len=100,
        has_timings=has_timings,
        environment={},
        stop=StopSwitch(),
    )
    fitted = session.fit(settings)
    assert (fitted.model, fitted.max_model_len, fitted.extra_body) == ("one", 100, sent)
