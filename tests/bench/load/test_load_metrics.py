import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.figures.activity import mean_active, tokens_by_chunk
from bench.load.figures.latency import derive, output_len
from bench.load.figures.metrics import distribution, percentile_name, summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.summary import Goodput, Summary
from bench.load.figures.timeslices import slice_edges
from bench.load.figures.window import SteadyWindow, Window
from bench.load.records import RequestRecord, RunRecord, Status
from cluster.errors import BatonError
from tests.bench.load.load_values import answer, run_of, skipped, steady_run


def goodput(summary: Summary) -> Goodput:
    assert summary.goodput is not None
    return summary.goodput


def test_definitions_by_hand() -> None:
    record = answer(1.0, [1.5, 1.75, 2.5], lag_s=0.25, end_s=3.0, tokens=6)
    latency = derive(record)
    assert latency.ttft_s == 0.5
    assert latency.e2e_s == 2.0
    assert latency.tpot_s == (2.0 - 0.5) / 5  # tokens, not chunks
    assert latency.itl_s == 0.5
    assert latency.gap_s == 0.75
    assert latency.send_lag_s == 0.25
    assert latency.ttft_from_send_s == 0.25
    assert latency.e2e_from_send_s == 1.75


def test_a_late_send_shows_in_every_latency_from_the_schedule() -> None:
    """Coordinated omission: the server is quick, but requests could only be sent late."""
    run = run_of([answer(i, [i + i * 0.5 + 0.1], lag_s=i * 0.5) for i in range(10)])
    found = summarize(run).distributions
    assert found["ttft_from_send"].median_s == pytest.approx(0.1)
    assert found["ttft"].median_s == pytest.approx(0.1 + 4.5 * 0.5)
    assert found["client_queue_time"].max_s == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "expected"),
    [(7, [1, 1, 1], 7), (None, [2, 3, 4], 9), (None, [], 3), (0, [], 0)],
)
def test_output_length_from_the_best_source(
    tokens: int | None, chunk_tokens: list[int], expected: int
) -> None:
    record = answer(0.0, [0.1, 0.2, 0.3], tokens=tokens, chunk_tokens=chunk_tokens)
    assert output_len(record) == expected
    assert sum(tokens_by_chunk(record)) == pytest.approx(expected)


def test_chunk_counts_are_used_only_when_they_add_up() -> None:
    assert tokens_by_chunk(answer(0.0, [0.1, 0.2], tokens=5, chunk_tokens=[4, 1])) == [4, 1]
    assert tokens_by_chunk(answer(0.0, [0.1, 0.2], tokens=6, chunk_tokens=[4, 1])) == [3, 3]
    assert tokens_by_chunk(answer(0.0, [0.1, 0.2], tokens=6, chunk_tokens=[6])) == [3, 3]


def test_whole_run_figures_by_hand() -> None:
    records = [
        answer(0.5, [1.0, 1.5], input_tokens=100),
        answer(1.0, [1.25, 4.5], input_tokens=200),
        answer(1.5, [1.75], status=Status.TIMEOUT, end_s=3.0, error="too slow"),
        skipped(2.0),
    ]
    summary = summarize(run_of(records), parse_slos("ttft=600ms,gap=1s"))
    assert summary.duration_s == 4.0
    assert (summary.num_offered, summary.completed, summary.failed) == (4, 2, 2)
    assert summary.by_status["timeout"] == summary.by_status["skipped"] == 1
    assert [(error.status, error.error, error.count) for error in summary.errors] == [
        ("timeout", "too slow", 1),
        ("skipped", "An earlier turn failed.", 1),
    ]
    assert (summary.total_input_tokens, summary.total_output_tokens) == (300, 4)
    assert summary.throughput.requests == 2 / 4
    assert summary.throughput.output_tokens == 4 / 4
    assert summary.throughput.total_tokens == 304 / 4
    good = goodput(summary)
    assert (good.num_good, good.attainment, good.requests) == (1, 1 / 4, 1 / 4)
    assert good.attainment_by_metric == {"ttft": 2 / 4, "gap": 1 / 4}
    assert (good.output_tokens, good.total_tokens) == (2 / 4, 102 / 4)
    assert summary.distributions["ttft"].num == 2
    assert summary.distributions["itl"].num == 2


def test_percentiles_are_exact_and_say_their_number() -> None:
    values = [0.1 * i for i in range(1, 101)]
    found = distribution(values, (50.0, 99.0, 99.9))
    assert found.num == 100
    assert found.percentiles_s == {
        "50": pytest.approx(np.percentile(values, 50)),
        "99": pytest.approx(np.percentile(values, 99)),
        "99.9": pytest.approx(np.percentile(values, 99.9)),
    }
    assert found.mean_s == pytest.approx(5.05)
    assert found.std_s == pytest.approx(np.std(values))
    assert found.max_s == pytest.approx(10.0)
    assert [percentile_name(p) for p in (50.0, 99.0, 99.9)] == ["50", "99", "99.9"]


@pytest.mark.parametrize("percentile", [-1.0, 100.5, math.nan])
def test_a_percentile_must_exist(percentile: float) -> None:
    with pytest.raises(BatonError, match="percentile"):
        summarize(run_of([]), percentiles=(percentile,))


def test_failures_do_not_enter_latencies_but_count_against_goodput() -> None:
    records = [answer(i * 0.1, [i * 0.1 + 0.1]) for i in range(8)]
    records += [answer(0.9, [0.91], status=Status.ERROR, error="boom", end_s=0.92) for _ in range(2)]
    summary = summarize(run_of(records), parse_slos("ttft=1s"))
    assert summary.distributions["ttft"].num == 8
    assert goodput(summary).attainment == 0.8
    assert goodput(summary).attainment_by_metric == {"ttft": 0.8}


EMPTY_RUNS = {
    "no records": run_of([]),
    "all skipped": run_of([skipped(0.0), skipped(1.0)]),
    "all refused": run_of([answer(0.0, [], status=Status.REFUSED, end_s=0.1, error="HTTP 503")]),
    "no tokens": run_of([answer(0.0, [], tokens=0, end_s=0.1)]),
    "at one moment": run_of([answer(0.0, [0.0], end_s=0.0)]),
}


@pytest.mark.parametrize("window", [Window(), Window(warmup_s=5.0, cooldown_s=5.0), SteadyWindow()])
@pytest.mark.parametrize("name", EMPTY_RUNS)
def test_empty_sets_give_none_and_never_nan(name: str, window: Window | SteadyWindow) -> None:
    summary = summarize(EMPTY_RUNS[name], parse_slos("ttft=1s,tpot=1s"), window)
    assert summary.distributions["tpot"].num == 0
    assert summary.distributions["tpot"].mean_s is None
    assert set(summary.distributions["tpot"].percentiles_s.values()) == {None}
    text = msgspec.json.encode(summary).decode()
    assert "NaN" not in text
    assert "Infinity" not in text
    if summary.num_offered == 0:
        assert goodput(summary).attainment is None


def test_without_slos_there_is_no_goodput() -> None:
    assert summarize(steady_run()).goodput is None


def test_a_window_takes_requests_by_scheduled_time() -> None:
    run = run_of([answer(float(i), [i + 0.5, i + 2.5], input_tokens=4) for i in range(11)])
    summary = summarize(run, parse_slos("e2e=10s"), Window(warmup_s=2.0, cooldown_s=3.0))
    assert (summary.span.start_s, summary.span.end_s) == (2.0, 7.0)
    assert summary.num_offered == 6  # scheduled at 2, 3, 4, 5, 6, 7
    assert summary.num_run_offered == 11
    assert summary.excluded_by_status == {"ok": 5}
    assert "2 s of warm-up and 3 s of cool-down" in summary.span.rule
    # The last of the six ends at 9.5.
    assert summary.duration_s == 7.5
    assert summary.throughput.output_tokens == 12 / 7.5
    assert summary.throughput.total_tokens == (12 + 6 * 4) / 7.5
    assert summary.throughput.requests == goodput(summary).requests == 6 / 7.5
    # Chunks at 2.5 .. 6.5 (first ones) and 2.5 .. 6.5 (second ones of 0 .. 4) came inside 5 s.
    assert summary.throughput.delivered_output_tokens == 10 / 5
    assert summary.throughput.delivered_requests == 5 / 5


def test_window_throughput_of_an_overloaded_server_is_what_it_delivered() -> None:
    """Offered 10 requests/s of one token, served one per second: the window must not report the offer."""
    run = run_of([answer(i / 10, [1.0 + i]) for i in range(200)])
    summary = summarize(run, (), Window(warmup_s=5.0))
    assert summary.throughput.delivered_output_tokens == pytest.approx(1.0, rel=0.1)
    assert summary.throughput.delivered_requests == pytest.approx(1.0, rel=0.1)
    assert summary.throughput.requests == summary.throughput.output_tokens == 150 / (200 - 5)
    assert summary.load.mean_second_half > 1.5 * summary.load.mean_first_half


def test_steady_window_leaves_out_a_request_life_at_each_side() -> None:
    run = steady_run(num=300, rate=10.0, ttft_s=0.5, tpot_s=0.1)  # lives of 1.4 s in 29.9 s
    summary = summarize(run, (), SteadyWindow())
    assert summary.span.start_s == pytest.approx(1.4)
    assert summary.span.end_s == pytest.approx(29.9 - 1.4)
    assert "p90 of E2E over 300 requests" in summary.span.rule
    assert summary.load.mean_in_flight == pytest.approx(14.0, rel=0.02)  # Little: 10/s · 1.4 s
    assert summary.load.mean_second_half == pytest.approx(summary.load.mean_first_half, rel=0.02)
    assert summary.throughput.delivered_output_tokens == pytest.approx(100.0, rel=0.02)


def test_steady_window_of_an_overload_cuts_a_quarter_at_most() -> None:
    run = run_of([answer(i / 10, [1.0 + i]) for i in range(201)])
    span = summarize(run, (), SteadyWindow()).span
    assert (span.start_s, span.end_s) == (5.0, 15.0)
    assert "a quarter" in span.rule


def test_a_window_of_an_interrupted_run_ends_where_offering_ended() -> None:
    records = [answer(float(i), [i + 0.5]) for i in range(10)] + [skipped(float(i)) for i in range(10, 60)]
    summary = summarize(run_of(records, is_complete=False), (), Window(warmup_s=1.0))
    assert summary.span.end_s == 9.5
    assert summary.num_offered == 9
    assert summary.excluded_by_status == {"ok": 1, "skipped": 50}


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_window_settings_are_checked(bad: float) -> None:
    with pytest.raises(BatonError, match="warm-up"):
        Window(warmup_s=bad)
    with pytest.raises(BatonError, match="cool-down"):
        Window(cooldown_s=bad)


def test_peak_in_flight_counts_back_to_back_requests_once() -> None:
    run = run_of([answer(float(i), [i + 1.0]) for i in range(5)])  # each starts as the one before ends
    assert summarize(run).load.max_in_flight == 1
    both = run_of([answer(0.0, [3.0]), answer(1.0, [2.0]), answer(2.5, [4.0])])
    assert summarize(both).load.max_in_flight == 2


def test_peak_tokens_per_second() -> None:
    run = run_of([answer(0.0, [0.5, 1.1, 1.2, 1.3, 2.5])])
    assert summarize(run).throughput.max_output_tokens_in_a_second == 3


def test_mean_active() -> None:
    starts, ends = np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 4.0])  # the last one is empty
    assert mean_active(starts, ends, np.array([0.0, 1.0, 2.0, 3.0, 3.0])).tolist() == [1.0, 2.0, 1.0, 0.0]


def test_timeslices_by_hand() -> None:
    records = [
        answer(0.0, [0.5, 1.5]),  # waits 0.5, runs 0.5 .. 1.5
        answer(1.0, [2.0], end_s=2.0),  # waits 1.0 .. 2.0
        answer(1.25, [], status=Status.ERROR, error="boom", end_s=1.75),
        skipped(2.5),
    ]
    slices = summarize(run_of(records)).timeslices
    assert [(one.start_s, one.end_s) for one in slices] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert [one.offered for one in slices] == [1, 2, 1]
    assert [one.completed for one in slices] == [0, 1, 1]
    assert [one.failed for one in slices] == [0, 1, 1]
    assert [one.waiting for one in slices] == [0.5, 1.5, 0.0]
    assert [one.running for one in slices] == [0.5, 0.5, 0.0]
    assert [one.output_tokens_per_s for one in slices] == [1.0, 1.0, 1.0]
    assert [one.num_ttft for one in slices] == [1, 1, 0]
    assert slices[1].ttft_p50_s == slices[1].ttft_p99_s == 1.0
    assert slices[2].ttft_p50_s is None


@pytest.mark.parametrize(("length_s", "num"), [(0.0, 1), (0.2, 1), (10.0, 10), (60.0, 60), (3600.0, 60)])
def test_slice_edges(length_s: float, num: int) -> None:
    edges = slice_edges(2.0, 2.0 + length_s)
    assert len(edges) == num + 1
    assert edges[0] == 2.0
    assert edges[-1] >= 2.0 + length_s - 1e-9


@st.composite
def runs(draw: st.DrawFn) -> RunRecord:
    times = st.floats(min_value=0.0, max_value=50.0)
    records: list[RequestRecord] = []
    for _ in range(draw(st.integers(min_value=0, max_value=12))):
        at_s = draw(times)
        status = draw(st.sampled_from(Status))
        if status is Status.SKIPPED:
            records.append(skipped(at_s))
            continue
        chunks = sorted(at_s + draw(times) for _ in range(draw(st.integers(min_value=0, max_value=4))))
        record = answer(at_s, chunks, status=status, tokens=draw(st.sampled_from([-1, None, 0, 7])))
        if status is Status.CANCELLED and draw(st.booleans()):
            record.end_s = None
        records.append(record)
    return run_of(records)


WINDOWS = st.one_of(
    st.builds(
        Window,
        warmup_s=st.floats(min_value=0, max_value=60),
        cooldown_s=st.floats(min_value=0, max_value=60),
    ),
    st.just(SteadyWindow()),
)


@settings(deadline=None, max_examples=60)
@given(runs(), WINDOWS)
def test_every_offered_request_and_token_is_accounted_for(
    run: RunRecord, window: Window | SteadyWindow
) -> None:
    summary = summarize(run, parse_slos("ttft=5s,tpot=1s,gap=3s"), window)
    assert sum(summary.by_status.values()) == summary.num_offered
    assert summary.num_offered + sum(summary.excluded_by_status.values()) == len(run.records)
    assert summary.completed + summary.failed == summary.num_offered
    assert sum(error.count for error in summary.errors) == summary.failed
    assert sum(one.offered for one in summary.timeslices) == len(run.records)
    assert sum(one.completed + one.failed for one in summary.timeslices) == len(run.records)
    good = goodput(summary)
    assert good.num_good <= summary.completed
    assert (good.requests or 0.0) <= (summary.throughput.requests or 0.0)
    assert (good.output_tokens or 0.0) <= (summary.throughput.output_tokens or 0.0)
    assert (good.total_tokens or 0.0) <= (summary.throughput.total_tokens or 0.0)
    if summary.duration_s > 0:
        assert summary.throughput.requests == summary.completed / summary.duration_s
    if good.attainment is not None:
        assert all((share or 0.0) >= good.attainment for share in good.attainment_by_metric.values())
    for found in summary.distributions.values():
        if found.num:
            p50, p90, p95, p99 = (found.percentiles_s[name] or 0.0 for name in ("50", "90", "95", "99"))
            assert 0 <= p50 <= p90 <= p95 <= p99 <= (found.max_s or 0.0)
    streamed = sum(sum(tokens_by_chunk(record)) for record in run.records)
    in_slices = sum(one.output_tokens_per_s * (one.end_s - one.start_s) for one in summary.timeslices)
    assert in_slices == pytest.approx(streamed)


def test_failures_that_differ_only_in_how_far_they_came_are_one_kind() -> None:
    cut = "no end within the time limit of 1 s, after {} with content"
    errors = [cut.format(words) for words in ("5 chunks", "1 chunk", "12 chunks")]
    others = ["no end within the time limit of 1 s, while connecting", "after 3 chunks with content", None]
    records = [answer(0.0, [], status=Status.TIMEOUT, error=error) for error in [*others, *errors]]
    records.append(answer(0.0, [], status=Status.INCOMPLETE, error=errors[0]))
    found = [(one.status, one.error, one.count) for one in summarize(run_of(records)).errors]
    assert found[0] == ("timeout", cut.format("1 to 12 chunks"), 3)
    assert found[1:] == [*(("timeout", error, 1) for error in others), ("incomplete", errors[0], 1)]
