"""The search for max goodput: where it begins, how it spends its probes, and what it says in the end."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.figures.slo import parse_slos
from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import End, Probe, ProbeOutcome, TargetAnswer
from bench.load.plans import arrivals
from bench.load.plans.settings import PlanSettings, TraceReplay
from bench.peers.estimate import (
    ALONE,
    DRAIN_S,
    MAX_PROBE_S,
    MIN_PROBES,
    MIN_REQUESTS,
    START_SHARE,
    WARMUP_SHARE,
    Estimate,
    Lengths,
    affordable_probes,
    estimate,
    longest_search_s,
    lowest_rate,
    probe_length_s,
    start_rate,
)
from bench.peers.goodput import goodput_of
from bench.peers.load import MAX_RATE, TraceLoad, probe_settings, search_settings, trace_lengths
from bench.peers.outcome import Mean
from cluster.errors import ConfigError

LOAD = TraceLoad(
    path=Path("trace.csv"),
    scale=16.0,
    slos=parse_slos("ttft=2s,tpot=100ms"),
    probe_s=40.0,
    seeds=(0, 1, 2),
    targets=(0.9, 0.99),
    max_probes=20,
    tolerance=0.2,
)
LENGTHS = Lengths(mean_input=100.0, long_input=200.0, mean_output=10.0)


def loop(concurrency: int, tok_per_s: float, ttft_ms: float, tpot_ms: float = 20.0) -> Mean:
    return Mean(
        concurrency=concurrency,
        num_rounds=1,
        num_requests=8,
        num_failed=0,
        output_tok_per_s=tok_per_s,
        lowest_tok_per_s=tok_per_s,
        highest_tok_per_s=tok_per_s,
        ttft_p50_ms=ttft_ms,
        ttft_p99_ms=ttft_ms,
        tpot_p50_ms=tpot_ms,
        tpot_p99_ms=tpot_ms,
    )


def guess(*means: Mean) -> Estimate:
    found = estimate(means, 256, 128, LENGTHS, LOAD.slos)
    assert found is not None
    return found


def test_the_estimate_is_what_tokens_cost() -> None:
    """Prompt tokens of 2 ms, output tokens of 4 ms: a request of 100 in and 10 out takes 240 ms."""
    request_s = 256 * 0.002 + 128 * 0.004
    assert guess(loop(1, 30.0, 512.0), loop(32, 128 / request_s, 9000.0)).capacity == pytest.approx(1 / 0.24)
    queued = guess(loop(4, 128 / request_s, 512.0 * 2.5))  # the fewest in flight are four
    assert queued.capacity == pytest.approx(1 / 0.24)


def test_slack_is_what_the_tightest_slo_leaves_for_waiting() -> None:
    """Alone a long prompt of 200 tokens takes 0.4 s of 2 s, and a token 20 ms of 100 ms."""
    found = guess(loop(1, 30.0, 512.0))
    assert found.slack == pytest.approx(0.8)
    assert found.alone_s == pytest.approx(100 * 0.002 + 10 * 0.020)
    assert guess(loop(1, 30.0, 512.0, tpot_ms=90.0)).slack == pytest.approx(0.1)
    assert guess(loop(1, 30.0, 2560.0)).slack == pytest.approx(0.0)  # the prompt takes all of it
    assert estimate([loop(1, 30.0, 512.0)], 256, 128, LENGTHS, parse_slos("e2e=9s")).slack == 1.0  # type: ignore[union-attr]


def test_a_server_that_misses_its_slos_alone_begins_at_the_lowest_rate() -> None:
    found = guess(loop(1, 8.0, 665.0, tpot_ms=113.0), loop(8, 21.0, 7760.0, tpot_ms=326.0))
    assert found.slack < 0
    lowest = lowest_rate(found, LOAD.probe_s)
    made = search_settings(LOAD, found, 9)
    assert made.start_rate == made.min_rate == lowest
    search = GoodputSearch(made)
    probe = search.next()
    assert probe is not None
    search.report(probe, ProbeOutcome(attainment=0.1, num_offered=12))
    for told in goodput_of(to_dict(search)):
        assert not told.is_lower_bound
        assert told.is_out_of_reach
        assert any("not reachable at any rate" in note and "10.0%" in note for note in told.notes)


def test_a_server_too_slow_to_be_probed_alone_is_not_called_out_of_reach() -> None:
    """A request takes 7 s by itself: at the lowest rate that a probe can measure they overlap."""
    found = Estimate(capacity=0.3, alone_s=7.0, slack=-1.0)
    search = GoodputSearch(search_settings(LOAD, found, 9))
    probe = search.next()
    assert probe is not None
    search.report(probe, ProbeOutcome(attainment=0.1, num_offered=12))
    told = goodput_of(to_dict(search))[0]
    assert not told.is_lower_bound
    assert not told.is_out_of_reach
    assert any("down to the lowest allowed" in note for note in told.notes)


def test_a_first_token_that_seems_to_take_all_the_time_leaves_some_for_the_others() -> None:
    assert 0 < guess(loop(1, 200.0, 5000.0)).capacity < math.inf


@pytest.mark.parametrize("means", [[], [loop(1, 0.0, math.nan)], [loop(1, math.nan, 5.0)]])
def test_without_figures_there_is_no_estimate_and_the_search_begins_low(means: list[Mean]) -> None:
    assert estimate(means, 256, 128, LENGTHS, LOAD.slos) is None
    assert start_rate(None, 0.13, 1000.0) == 0.13
    assert not search_settings(LOAD, None, 9).alone_at_min_rate  # nothing says what a request alone takes


@given(st.floats(1e-6, 1e6), st.floats(-3.0, 1.0))
def test_the_first_rate_is_one_that_may_be_probed(capacity: float, slack: float) -> None:
    found = Estimate(capacity=capacity, alone_s=1.0, slack=slack)
    assert 0.13 <= start_rate(found, 0.13, 1000.0) <= 1000.0


@given(st.floats(0.01, 50.0), st.floats(1.0, 120.0), st.floats(0.001, 100.0))
def test_a_probe_measures_enough_requests_and_is_no_shorter_than_asked(
    rate: float, probe_s: float, alone_s: float
) -> None:
    lowest = lowest_rate(Estimate(capacity=9.0, alone_s=alone_s, slack=1.0), probe_s)
    assert lowest * alone_s >= ALONE * (1 - 1e-9)
    for at in (max(rate, lowest), lowest):
        length_s = probe_length_s(at, probe_s)
        assert probe_s <= length_s <= max(probe_s, MAX_PROBE_S)
        assert (length_s - WARMUP_SHARE * probe_s) * at >= MIN_REQUESTS * (1 - 1e-9)


def test_a_probe_is_made_of_its_rate_seed_and_length() -> None:
    base = PlanSettings(
        model="m", arrival=arrivals.trace_times(1.0), workload=TraceReplay(path="t.csv"), duration_s=40.0
    )
    slow, fast = probe_settings(base, LOAD, Probe(0.2, 3), 7), probe_settings(base, LOAD, Probe(5.0, 1), 8)
    assert (slow.arrival.rate, slow.seed, slow.salt) == (0.2, 3, 7)
    assert slow.duration_s == pytest.approx(40 / 6 + 12 / 0.2)
    assert fast.duration_s == 40.0


@given(st.floats(-1e4, 1e5), st.floats(0.01, 1.0), st.floats(5.0, 120.0), st.integers(1, 40))
def test_searches_share_the_time_that_is_left(left_s: float, share: float, probe_s: float, most: int) -> None:
    probes = affordable_probes(left_s, share, probe_s, most)
    assert 0 <= probes <= most
    assert probes * (probe_s + DRAIN_S) <= max(0.0, left_s) * (1 + 1e-9)
    least = min(MIN_PROBES, most)
    assert probes == 0 or probes >= least
    assert probes <= max(least, max(0.0, left_s) * share / (probe_s + DRAIN_S) + 1e-9)


@given(st.floats(1.0, 1e5), st.floats(0.01, 1.0))
def test_a_search_of_long_probes_has_room_for_the_least_of_them_and_ends_within_what_is_left(
    left_s: float, share: float
) -> None:
    most_s = longest_search_s(left_s, share, 40.0)
    assert most_s <= left_s
    assert most_s >= min(left_s, MIN_PROBES * (MAX_PROBE_S + DRAIN_S))
    assert most_s >= share * left_s


@settings(deadline=None, max_examples=80)
@given(
    st.floats(0.06, 0.9),
    st.floats(0.6, 1.0),
    st.floats(1.0, 50.0),
    st.lists(st.floats(0.85, 1.18), min_size=3, max_size=3),
)
def test_eleven_probes_find_both_targets_of_the_first_seed(
    share: float, second: float, capacity: float, luck: list[float]
) -> None:
    """Where SLOs bind between a sixteenth and nine tenths of the estimated capacity, as measured so far; the
    99 % target somewhat below the 90 %; each seed's part of the trace a little easier or harder."""
    at_90 = share * capacity

    def attainment(probe: Probe) -> float:
        if probe.rate > at_90 * luck[probe.seed]:
            return 0.5
        return 1.0 if probe.rate <= at_90 * luck[probe.seed] * second else 0.95

    found = Estimate(capacity=capacity, alone_s=ALONE / 0.02, slack=1.0)
    made = msgspec.structs.replace(search_settings(LOAD, found, 11), min_rate=0.02)
    search = GoodputSearch(made)
    while (probe := search.next()) is not None:
        search.report(probe, ProbeOutcome(attainment=attainment(probe), num_offered=100))
    tables = goodput_of(to_dict(search))
    for answer, told, factor in zip(search.answers(), tables, (1.0, second), strict=True):
        first, truth = answer.seeds[0], at_90 * luck[0] * factor
        assert first.end is End.FOUND
        assert first.rate is not None
        assert first.failing_rate is not None
        assert truth / 1.2 * (1 - 1e-6) <= first.rate <= truth * (1 + 1e-6)
        assert truth <= first.failing_rate * (1 + 2e-6)
        assert told.num_seeds >= 1
        assert told.seeds[0].is_converged
        assert (told.seeds[0].passed, told.seeds[0].failed) == (first.rate, first.failing_rate)


def test_a_seed_that_did_not_end_is_in_no_figure_and_told() -> None:
    search = GoodputSearch(search_settings(LOAD, Estimate(capacity=10.0, alone_s=0.5, slack=1.0), 5))
    while (probe := search.next()) is not None:
        passes = probe.rate <= 5.0 and probe.seed == 0  # the next seed would pull a mean down
        search.report(probe, ProbeOutcome(attainment=float(passes), num_offered=50))
    found = goodput_of(to_dict(search))[0]
    assert found.num_seeds == 1
    assert not found.is_converged
    assert not found.is_lower_bound  # nothing passed at the seed that did not end: it says nothing for it
    assert found.requests_per_s == found.passed
    assert found.requests_per_s == pytest.approx(5.0, rel=0.2)
    assert any(note.startswith("Seed 1: the search stopped after 5 of at most 5") for note in found.notes)
    assert "Not searched, so in no figure: seed 2." in found.notes
    assert [(one.is_converged, one.is_counted) for one in found.seeds] == [(True, True), (False, False)]


def test_a_seed_that_did_not_end_and_had_passed_the_figure_makes_it_a_lower_bound() -> None:
    search = GoodputSearch(search_settings(LOAD, Estimate(capacity=10.0, alone_s=0.5, slack=1.0), 4))
    while (probe := search.next()) is not None:
        passes = probe.rate <= 5.0 or probe.seed == 1
        search.report(probe, ProbeOutcome(attainment=float(passes), num_offered=50))
    found = goodput_of(to_dict(search))[0]
    first, second = found.seeds
    assert (first.is_converged, second.is_converged) == (True, False)
    assert second.passed == first.passed == found.requests_per_s
    assert found.is_lower_bound
    assert found.num_seeds == 1
    assert msgspec.convert(to_dict(search)["answers"][0], TargetAnswer).is_lower_bound  # one rule for both


def test_a_seed_that_is_enough_says_why_there_are_no_others() -> None:
    made = search_settings(LOAD, Estimate(capacity=10.0, alone_s=0.5, slack=1.0), 20, one_seed_below=9.0)
    search = GoodputSearch(made)
    while (probe := search.next()) is not None:
        search.report(probe, ProbeOutcome(attainment=float(probe.rate <= 5.0), num_offered=50))
    for found in goodput_of(to_dict(search)):
        assert found.is_converged
        assert found.num_seeds == 1
        assert any("below 9 req/s, which is enough" in note for note in found.notes)


def test_a_search_without_a_finished_seed_tells_a_lower_bound() -> None:
    search = GoodputSearch(search_settings(LOAD, Estimate(capacity=10.0, alone_s=0.5, slack=1.0), 2))
    while (probe := search.next()) is not None:
        search.report(probe, ProbeOutcome(attainment=1.0, num_offered=50))
    found = goodput_of(to_dict(search))[0]
    assert not found.is_converged
    assert found.is_lower_bound
    assert found.requests_per_s == pytest.approx(1.2**2 * round(START_SHARE * 10.0, 3))
    assert any("stopped after 2 of at most 2 probes" in note for note in found.notes)


def test_the_settings_are_the_loads() -> None:
    made = search_settings(LOAD, None, 7)
    assert (made.targets, made.seeds, made.tolerance, made.max_probes) == ((0.9, 0.99), (0, 1, 2), 0.2, 7)
    assert made.max_rate == MAX_RATE
    assert made.growth == pytest.approx(1.44)  # one bisection ends a step


def test_a_trace_too_short_for_its_probes_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"trace\.csv has too few rows for probes of 40 s"):
        search_settings(LOAD, None, 7, max_rate=0.05)


def test_lengths_are_those_of_the_whole_trace_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": i, "input_length": 16 * (i + 1), "output_length": 32} for i in range(100))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = trace_lengths(dataclasses.replace(LOAD, path=trace))
    assert found == Lengths(mean_input=50.5, long_input=91, mean_output=2.0)
