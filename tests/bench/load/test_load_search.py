import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.goodput.search import GoodputSearch, propose, to_dict
from bench.load.goodput.values import (
    End,
    Figure,
    Probe,
    ProbeOutcome,
    SearchSettings,
    SeedAnswer,
    TargetAnswer,
    figure_of,
)
from cluster.errors import BatonError

Oracle = Callable[[Probe], float | ProbeOutcome]


def run_search(settings: SearchSettings, oracle: Oracle) -> GoodputSearch:
    search = GoodputSearch(settings)
    while (probe := search.next()) is not None:
        assert search.next() == probe  # asking again changes nothing
        assert settings.min_rate <= probe.rate <= settings.max_rate
        assert len(search.log) < settings.max_probes
        found = oracle(probe)
        outcome = (
            found if isinstance(found, ProbeOutcome) else ProbeOutcome(attainment=found, num_offered=200)
        )
        search.report(probe, outcome)
    return search


def step_at(threshold: float, above: float = 0.0) -> Oracle:
    return lambda probe: 1.0 if probe.rate <= threshold else above


def slope(full: float, empty: float) -> Oracle:
    """Attainment 1 up to `full`, then down along the log of the rate to 0 at `empty`."""

    def oracle(probe: Probe) -> float:
        where = math.log(probe.rate / full) / math.log(empty / full)
        return 1 - min(1.0, max(0.0, where))

    return oracle


def settings_of(**changes: Any) -> SearchSettings:
    return SearchSettings(**{"start_rate": 1.0, "max_probes": 500, **changes})


rates = st.floats(min_value=0.02, max_value=5000.0)


@settings(deadline=None, max_examples=60)
@given(threshold=rates, start=rates, growth=st.floats(1.1, 8.0), tolerance=st.floats(0.01, 0.5))
def test_a_step_is_found_within_the_tolerance(
    threshold: float, start: float, growth: float, tolerance: float
) -> None:
    settings = settings_of(start_rate=start, growth=growth, tolerance=tolerance)
    for answer in run_search(settings, step_at(threshold)).answers():
        assert answer.is_converged
        assert answer.notes == ()
        for one in answer.seeds:
            assert one.end is End.FOUND
            assert one.rate <= threshold * (1 + 1e-9)
            assert threshold < (one.failing_rate or 0.0) <= one.rate * (1 + tolerance) * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(full=rates, span=st.floats(1.05, 20.0), start=rates)
def test_a_monotone_server_is_found_for_both_targets(full: float, span: float, start: float) -> None:
    settings = settings_of(start_rate=start)
    for answer in run_search(settings, slope(full, full * span)).answers():
        true_rate = full * span ** (1 - answer.target)
        assert true_rate / 1.05 * (1 - 1e-6) <= answer.rate <= true_rate * (1 + 1e-6)
        assert answer.ci_low is not None
        assert answer.ci_high is not None
        assert answer.ci_low <= answer.rate <= true_rate * (1 + 1e-6) <= answer.ci_high * (1 + 2e-6)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 5))
def test_noise_never_loops_and_answers_follow_the_rule(
    luck: random.Random, max_probes: int, num_seeds: int
) -> None:
    def oracle(probe: Probe) -> ProbeOutcome:
        return ProbeOutcome(
            attainment=luck.choice([None, luck.random(), 1.0, 0.95]),
            num_offered=luck.choice([0, 1, 200]),
            valid=luck.random() > 0.2,
        )

    settings = settings_of(max_probes=max_probes, seeds=tuple(range(num_seeds)))
    search = run_search(settings, oracle)
    assert len(search.log) <= max_probes
    last = dict(search.log)
    for answer in search.answers():
        for one in answer.seeds:
            mine = {probe.rate: outcome for probe, outcome in last.items() if probe.seed == one.seed}
            passed: set[float] = set()
            lowest_failure, best = math.inf, None
            for rate, outcome in mine.items():
                if outcome.valid and outcome.num_offered and (outcome.attainment or 0) >= answer.target:
                    passed.add(rate)
                else:
                    lowest_failure = min(lowest_failure, rate)
                best = max((one for one in passed if one < lowest_failure), default=None)
                if lowest_failure <= max(settings.min_rate, (best or 0.0) * 1.05 * (1 + 1e-9)):
                    break  # what comes later was probed for another target
                if lowest_failure == math.inf and (best or 0.0) >= settings.max_rate:
                    break
            known = 0.0 if one.end is End.NOTHING_PASSED else None
            assert one.rate == (known if best is None else best)
            assert (one.failing_rate or math.inf) == lowest_failure
            assert (one.end is End.NOT_SEARCHED) is (not mine)
        ended = [one.rate for one in answer.seeds if one.is_converged]
        counted = [rate for rate in ended or [one.rate for one in answer.seeds] if rate is not None]
        assert answer.rate == (pytest.approx(sum(counted) / len(counted)) if counted else None)
        begun = [one for one in answer.seeds if one.end is not End.NOT_SEARCHED and not one.is_converged]
        if answer.is_lower_bound and ended:
            assert begun
            assert all((one.rate or -1.0) >= (answer.rate or 0.0) for one in begun)
        assert answer.num_seeds_searched == len({probe.seed for probe in last})
        if answer.ci_high is not None:
            assert answer.bracket_low is not None
            assert answer.num_seeds_searched >= 3
    json.dumps(to_dict(search), allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), rates)
def test_a_noisy_server_without_a_budget_ends_by_itself(luck: random.Random, middle: float) -> None:
    """Attainment falls with the rate, with noise that makes it go up and down from probe to probe."""

    def oracle(probe: Probe) -> float:
        return min(1.0, max(0.0, 1 - 0.1 * probe.rate / middle + luck.gauss(0, 0.03)))

    search = run_search(settings_of(max_probes=10_000), oracle)
    assert len(search.log) < 400
    assert all(one.end is not End.UNFINISHED for answer in search.answers() for one in answer.seeds)


def seed_of(number: int, rate: float | None, end: End) -> SeedAnswer:
    return SeedAnswer(seed=number, rate=rate, failing_rate=None, attainment=None, num_offered=0, end=end)


@pytest.mark.parametrize(
    ("ends", "rate", "is_lower_bound", "seeds"),
    [
        ([(2.0, End.FOUND), (4.0, End.FOUND)], 3.0, False, (0, 1)),
        ([(2.0, End.FOUND), (0.0, End.NOTHING_PASSED)], 1.0, False, (0, 1)),
        ([(2.0, End.FOUND), (None, End.NOT_SEARCHED)], 2.0, False, (0,)),
        ([(2.0, End.FOUND), (2.0, End.UNFINISHED)], 2.0, True, (0,)),  # it had passed it already
        ([(2.0, End.FOUND), (9.0, End.MAX_RATE)], 2.0, True, (0,)),
        ([(2.0, End.FOUND), (1.0, End.UNFINISHED)], 2.0, False, (0,)),  # says nothing for it
        ([(2.0, End.FOUND), (None, End.UNFINISHED)], 2.0, False, (0,)),
        ([(2.0, End.FOUND), (3.0, End.UNFINISHED), (None, End.UNFINISHED)], 2.0, False, (0,)),
        ([(0.0, End.OUT_OF_REACH), (None, End.UNFINISHED)], 0.0, False, (0,)),
        ([(2.0, End.UNFINISHED), (4.0, End.MAX_RATE), (None, End.UNFINISHED)], 3.0, True, (0, 1)),
        ([(None, End.UNFINISHED), (None, End.NOT_SEARCHED)], None, False, ()),
        ([], None, False, ()),
    ],
)
def test_what_is_a_figure_over_which_seeds_and_when_a_lower_bound(
    ends: list[tuple[float | None, End]], rate: float | None, is_lower_bound: bool, seeds: tuple[int, ...]
) -> None:
    found = figure_of([seed_of(number, *one) for number, one in enumerate(ends)])
    assert found == Figure(rate=rate, is_lower_bound=is_lower_bound, seeds=seeds)


def test_nothing_passes() -> None:
    search = run_search(settings_of(start_rate=4.0, min_rate=0.5), lambda probe: 0.0)
    answer = search.answers()[0]
    assert answer.rate == 0.0
    assert (answer.attainment_low, answer.attainment_high) == (None, None)
    assert {one.end for one in answer.seeds} == {End.NOTHING_PASSED}
    assert answer.is_converged  # a finding
    assert {one.failing_attainment for one in answer.seeds} == {0.0}
    assert "0.5 req/s; the answer is 0 (0.0% of 200 requests met every SLO there)" in answer.notes[0]
    # Steps down that grow, then later seeds try the lowest rate at once; the second target needs no probe.
    assert [probe.rate for probe, _ in search.log] == [4.0, 2.0, 0.5, 0.5, 0.5]


def test_a_target_out_of_reach_is_a_finding_even_where_the_other_is_found() -> None:
    """Some requests are too long for the SLO, however alone: 90 % is found, 99 % is not reachable."""
    settings = settings_of(min_rate=0.2, alone_at_min_rate=True, tolerance=0.2, growth=1.44, max_probes=20)
    search = run_search(settings, lambda probe: 0.93 if probe.rate <= 1.7 + probe.seed / 10 else 0.5)
    low, high = search.answers()
    assert (low.is_converged, high.is_converged) == (True, True)
    assert {one.end for one in low.seeds} == {End.FOUND}
    assert {one.end for one in high.seeds} == {End.OUT_OF_REACH}
    assert high.rate == 0.0
    assert high.notes[0] == (
        "Seed 0: 99% is not reachable at any rate: at 0.2 req/s, one at a time for the most part, only 93.0% "
        "of 200 requests met every SLO."
    )


def test_what_was_not_measured_at_the_lowest_rate_is_no_finding() -> None:
    lagging = ProbeOutcome(attainment=0.0, num_offered=20, valid=False)
    search = run_search(settings_of(min_rate=1.0, seeds=(0,)), lambda _: lagging)
    assert [probe.rate for probe, _ in search.log] == [1.0, 1.0]
    for answer in search.answers():
        assert not answer.is_converged
        assert answer.seeds[0].end is End.UNFINISHED
        assert answer.rate is None


def test_a_first_seed_far_below_the_others_is_enough() -> None:
    search = run_search(settings_of(one_seed_below=2.0), step_at(1.5))
    assert {probe.seed for probe, _ in search.log} == {0}
    for answer in search.answers():
        assert answer.is_converged
        assert [one.is_converged for one in answer.seeds] == [True, False, False]
    assert search.notes()[0] == (
        "Not searched, so in no figure: seeds 1, 2 (the first one ended below 2 req/s, which is enough)."
    )
    near = run_search(settings_of(one_seed_below=1.0), step_at(1.5))
    assert {probe.seed for probe, _ in near.log} == {0, 1, 2}


def test_the_first_seed_is_asked_for_every_target_before_the_others() -> None:
    search = run_search(settings_of(), slope(5.0, 10.0))
    seeds = [probe.seed for probe, _ in search.log]
    first = [seed == 0 for seed in seeds]
    assert first == sorted(first, reverse=True)
    cut = run_search(settings_of(max_probes=sum(first)), slope(5.0, 10.0))
    assert all(answer.seeds[0].end is End.FOUND for answer in cut.answers())


def server_of(capacity: float, luck: random.Random) -> Oracle:
    """A queue with one way to be late: attainment falls with the load, faster near capacity; of as many
    requests as a probe of 40 s offers each is good or not by itself."""
    factors = {seed: luck.uniform(0.9, 1.1) for seed in range(3)}

    def oracle(probe: Probe) -> ProbeOutcome:
        load = probe.rate / (capacity * factors[probe.seed])
        share = 1 - 0.08 * min(1.0, load) ** 4 if load <= 1 else max(0.0, 0.92 - 2 * (load - 1))
        num = max(12, round(40 * probe.rate))
        num_good = sum(luck.random() < share for _ in range(num))
        return ProbeOutcome(attainment=num_good / num, num_offered=num)

    return oracle


PEER_LIKE = {"tolerance": 0.2, "growth": 1.44, "min_rate": 0.145, "alone_at_min_rate": True}


@settings(deadline=None, max_examples=80)
@given(
    capacity=st.floats(0.3, 30.0),
    error=st.floats(0.15, 4.0),
    seed=st.integers(0, 10_000),
)
def test_a_noisy_server_is_found_within_the_budget_from_a_bad_estimate(
    capacity: float, error: float, seed: int
) -> None:
    given = settings_of(start_rate=max(0.145, capacity * error), max_probes=40, **PEER_LIKE)
    search = run_search(given, server_of(capacity, random.Random(seed)))
    assert len(search.log) < 40
    for answer in search.answers():
        assert answer.is_converged
        for one in answer.seeds:
            assert one.failing_rate is not None
            assert one.end is End.OUT_OF_REACH or one.failing_rate <= (one.rate or 0.0) * 1.2 * (1 + 1e-6)
    seed_0 = [probe for probe, _ in search.log if probe.seed == 0]
    assert len(seed_0) <= 20
    again = run_search(given, server_of(capacity, random.Random(seed)))
    assert again.log == search.log  # no clock, no luck of its own
    assert to_dict(again) == to_dict(search)


@settings(deadline=None, max_examples=60)
@given(capacity=st.floats(0.3, 30.0), error=st.floats(0.15, 4.0), seed=st.integers(0, 10_000))
def test_a_bracket_only_narrows(capacity: float, error: float, seed: int) -> None:
    """What has ended stands; before, failing rates never rise, and what passed stays passed until something
    below it fails."""
    search = GoodputSearch(settings_of(start_rate=max(0.145, capacity * error), **PEER_LIKE))
    oracle = server_of(capacity, random.Random(seed))
    before = search.answers()
    while (probe := search.next()) is not None:
        outcome = oracle(probe)
        assert isinstance(outcome, ProbeOutcome)
        search.report(probe, outcome)
        for old, new in zip(before, search.answers(), strict=True):
            for was, now in zip(old.seeds, new.seeds, strict=True):
                assert now == was or not was.is_converged
                assert (now.failing_rate or math.inf) <= (was.failing_rate or math.inf)
                if was.rate and (now.rate or 0.0) < was.rate:
                    assert now.failing_rate is not None
                    assert now.failing_rate <= was.rate
        before = search.answers()


def test_bad_luck_far_below_does_not_undo_a_bracket() -> None:
    """On the way down for 99 %, two of twelve requests fail at the lowest rate: 90 % stays found."""
    given = settings_of(start_rate=2.0, seeds=(0,), max_probes=40, **PEER_LIKE)
    search = run_search(given, lambda p: 0.83 if p.rate < 0.2 else 0.95 if p.rate <= 2.5 else 0.4)
    low, high = search.answers()
    assert low.seeds[0].end is End.FOUND
    assert 2.5 / 1.2 <= (low.rate or 0.0) <= 2.5
    assert high.seeds[0].end is End.OUT_OF_REACH
    (note,) = low.notes
    assert note == (
        "Seed 0: 0.145 req/s, probed later for another target, reached 83.0% only; the bracket above it "
        "stands."
    )
    assert len({probe for probe, _ in search.log}) == len(search.log) <= 8


def test_later_seeds_and_targets_are_cheap_where_they_agree() -> None:
    given = settings_of(start_rate=1.0, max_probes=40, **PEER_LIKE)
    search = run_search(given, lambda p: 1.0 if p.rate <= 1.9 else 0.95 if p.rate <= 2.9 else 0.4)
    by_seed = [sum(probe.seed == seed for probe, _ in search.log) for seed in (0, 1, 2)]
    assert by_seed[0] <= 8
    assert max(by_seed[1:]) <= 4  # two ends for each target


def test_everything_passes() -> None:
    search = run_search(settings_of(start_rate=4.0, max_rate=20.0), lambda probe: 1.0)
    answer = search.answers()[1]
    assert answer.rate == 20.0
    assert {one.end for one in answer.seeds} == {End.MAX_RATE}
    assert answer.ci_high is None
    assert "may be higher" in answer.notes[0]
    assert [probe.rate for probe, _ in search.log] == [4.0, 8.0, 16.0, 20.0, 20.0, 20.0]


def test_seeds_that_agree_cost_two_probes_each() -> None:
    search = run_search(settings_of(start_rate=1.0), step_at(10.0))
    by_seed = [sum(probe.seed == seed for probe, _ in search.log) for seed in (0, 1, 2)]
    assert by_seed[0] <= 9  # 1, 2, 4, 8, 16 and four bisections
    assert by_seed[1:] == [2, 2]


def test_a_seed_that_differs_widens_in_growing_steps() -> None:
    thresholds = {0: 10.0, 1: 40.0, 2: 2.0}
    search = run_search(
        settings_of(targets=(0.9,)), lambda probe: float(probe.rate <= thresholds[probe.seed])
    )
    (answer,) = search.answers()
    for one in answer.seeds:
        assert one.rate <= thresholds[one.seed] < (one.failing_rate or 0.0)
    assert max(sum(probe.seed == seed for probe, _ in search.log) for seed in (1, 2)) <= 12
    assert answer.ci_low is not None
    assert answer.ci_high is not None
    assert answer.ci_low < 2.0
    assert answer.ci_high > 40.0


def test_the_second_target_reuses_the_probes_of_the_first() -> None:
    both = run_search(settings_of(), slope(5.0, 10.0))
    assert len({probe for probe, _ in both.log}) == len(both.log)
    alone = [run_search(settings_of(targets=(target,)), slope(5.0, 10.0)) for target in (0.9, 0.99)]
    assert len(both.log) < sum(len(search.log) for search in alone)
    assert [answer.target for answer in both.answers()] == [0.9, 0.99]
    assert both.answers()[0].rate >= both.answers()[1].rate


def test_an_invalid_probe_is_repeated_once_and_then_fails() -> None:
    def oracle(probe: Probe) -> ProbeOutcome:
        is_lagging = probe.rate > 6.0  # the client cannot offer more
        return ProbeOutcome(attainment=1.0, num_offered=100, valid=not is_lagging)

    search = run_search(settings_of(targets=(0.9,), seeds=(0,)), oracle)
    lagging = [probe for probe, outcome in search.log if not outcome.valid]
    assert lagging[0::2] == lagging[1::2]  # each one twice in a row
    assert len(set(lagging)) * 2 == len(lagging)
    (answer,) = search.answers()
    assert 6.0 / 1.05 <= answer.rate <= 6.0
    assert any("8 req/s was invalid twice and counts as not passing" in note for note in search.notes())


def test_an_invalid_probe_that_is_valid_the_second_time_counts_by_that() -> None:
    seen: set[Probe] = set()

    def oracle(probe: Probe) -> ProbeOutcome:
        is_first = probe not in seen
        seen.add(probe)
        return ProbeOutcome(attainment=float(probe.rate <= 3.0), num_offered=100, valid=not is_first)

    (answer,) = run_search(settings_of(targets=(0.9,)), oracle).answers()
    assert answer.is_converged
    assert answer.notes == ()
    assert 3.0 / 1.05 <= answer.rate <= 3.0


def test_a_probe_that_offered_nothing_is_no_measurement() -> None:
    search = GoodputSearch(settings_of())
    probe = search.next()
    assert probe is not None
    search.report(probe, ProbeOutcome(attainment=None, num_offered=0))
    assert search.next() == probe
    search.report(probe, ProbeOutcome(attainment=None, num_offered=0))
    assert search.next() == Probe(0.5, 0)


def test_the_budget_ends_the_search_with_what_is_known() -> None:
    search = run_search(settings_of(max_probes=3), step_at(100.0))
    assert len(search.log) == 3
    first = search.answers()[0]
    assert first.seeds[0].rate == 4.0
    assert first.seeds[0].end is End.UNFINISHED
    assert "stopped after 3 of at most 3 probes; so far 4 req/s passed and none failed" in first.notes[0]
    assert not first.is_converged


def test_a_lucky_pass_above_a_failure_does_not_count() -> None:
    table = {1.0: 1.0, 2.0: 0.5, 4.0: 1.0}
    search = GoodputSearch(settings_of(targets=(0.9,), seeds=(0,), growth=2.0))
    for rate in (1.0, 2.0):
        assert search.next() == Probe(rate, 0)
        search.report(Probe(rate, 0), ProbeOutcome(attainment=table[rate], num_offered=10))
    assert search.next() == Probe(math.sqrt(2.0), 0)
    assert search.answers()[0].seeds[0].rate == 1.0


def test_pooled_attainment_at_the_answer() -> None:
    (answer,) = run_search(settings_of(targets=(0.9,)), lambda p: 0.95 if p.rate <= 3 else 0.2).answers()
    assert answer.attainment_low == pytest.approx(0.9297, abs=2e-4)  # 570 of 600, by Wilson's formula
    assert answer.attainment_high == pytest.approx(0.9647, abs=2e-4)


def test_few_seeds_are_noted() -> None:
    for seeds in ((5,), (5, 6)):
        search = run_search(settings_of(seeds=seeds), step_at(3.0))
        for answer in search.answers():
            assert answer.ci_low is None
            assert answer.ci_high is None
            assert answer.notes == ()
            assert answer.bracket_low == min(one.rate or 0.0 for one in answer.seeds)
            assert answer.bracket_high == max(one.failing_rate or 0.0 for one in answer.seeds)
        assert [note for note in search.notes() if "3 or more" in note] == list(search.notes())


def test_a_seed_without_a_probe_is_in_no_figure() -> None:
    """Cut short after one passing probe: the answer is that rate at least, and not a third of it."""
    search = run_search(settings_of(max_probes=1), step_at(3.0))
    for answer in search.answers():
        assert answer.rate == 1.0
        assert (answer.num_seeds_searched, answer.is_lower_bound, answer.is_converged) == (1, True, False)
        assert (answer.bracket_low, answer.bracket_high) == (1.0, None)
        assert [one.end for one in answer.seeds] == [End.UNFINISHED, End.NOT_SEARCHED, End.NOT_SEARCHED]
        assert [one.rate for one in answer.seeds] == [1.0, None, None]
    assert search.notes()[0] == "Not searched, so in no figure: seeds 1, 2."


def test_a_search_in_which_nothing_passed_yet_has_no_rate() -> None:
    answer = run_search(settings_of(max_probes=2), step_at(0.1)).answers()[0]
    assert answer.rate is None
    assert (answer.bracket_low, answer.bracket_high) == (0.0, 0.5)
    assert "no rate has passed and 0.5 req/s failed" in answer.notes[0]


def test_brackets_that_are_still_wide_give_no_interval() -> None:
    """The spread of unfinished brackets says nothing about the seeds."""
    whole = run_search(settings_of(targets=(0.9,)), step_at(3.0))
    search = run_search(settings_of(targets=(0.9,), max_probes=len(whole.log) - 1), step_at(3.0))
    (answer,) = search.answers()
    assert answer.num_seeds_searched == 3
    assert not answer.is_converged
    assert (answer.ci_low, answer.ci_high) == (None, None)


def test_the_interval_is_the_bracket_widened_for_the_spread_of_the_seeds() -> None:
    thresholds = {0: 3.0, 1: 3.6, 2: 4.2}
    (answer,) = run_search(
        settings_of(targets=(0.9,)), lambda probe: float(probe.rate <= thresholds[probe.seed])
    ).answers()
    lows = [one.rate or 0.0 for one in answer.seeds]
    highs = [one.failing_rate or 0.0 for one in answer.seeds]
    assert answer.ci_low == pytest.approx(statistics.fmean(lows) - 4.3027 * statistics.stdev(lows) / 3**0.5)
    assert answer.ci_high == pytest.approx(
        statistics.fmean(highs) + 4.3027 * statistics.stdev(highs) / 3**0.5
    )
    assert (answer.bracket_low, answer.bracket_high) == (min(lows), max(highs))


def test_another_probe_than_the_due_one_is_refused() -> None:
    search = GoodputSearch(settings_of())
    outcome = ProbeOutcome(attainment=1.0, num_offered=1)
    with pytest.raises(BatonError, match="is due"):
        search.report(Probe(3.0, 0), outcome)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(BatonError, match="not a share"):
            search.report(Probe(1.0, 0), msgspec.structs.replace(outcome, attainment=share))
    assert search.log == ()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"targets": ()}, "targets"),
        ({"targets": (0.0,)}, "targets"),
        ({"targets": (1.1,)}, "targets"),
        ({"targets": (math.nan,)}, "targets"),
        ({"targets": (0.9, 0.9)}, "targets"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"growth": 1.0}, "growth"),
        ({"growth": math.inf}, "growth"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"max_probes": 0}, "max_probes"),
        ({"one_seed_below": -1.0}, "one_seed_below"),
        ({"one_seed_below": math.nan}, "one_seed_below"),
        ({"min_rate": 0.0}, "min_rate"),
        ({"min_rate": 5.0, "max_rate": 4.0}, "min_rate"),
        ({"start_rate": math.nan}, "start_rate"),
        ({"start_rate": 1e9}, "start_rate"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], name: str) -> None:
    with pytest.raises(BatonError, match=name):
        settings_of(**change)


@settings(deadline=None, max_examples=60)
@given(
    passing=st.none() | rates,
    ratio=st.floats(1.06, 1e4),
    has_failing=st.booleans(),
    anchor=rates,
    first_step=st.floats(1.05, 4.0),
)
def test_a_proposal_lies_strictly_inside_the_bracket(
    passing: float | None, ratio: float, has_failing: bool, anchor: float, first_step: float
) -> None:
    settings = settings_of()
    failing = min((passing or 1.0) * ratio, settings.max_rate) if has_failing else None
    rate = propose(passing, failing, anchor, first_step, settings)
    assert (passing or 0.0) < rate < (failing or math.inf)
    assert settings.min_rate <= rate <= settings.max_rate


def test_answers_are_values() -> None:
    answer = run_search(settings_of(), step_at(3.0)).answers()[0]
    assert msgspec.convert(msgspec.to_builtins(answer), TargetAnswer) == answer
