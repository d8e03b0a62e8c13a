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
from bench.load.goodput.values import End, Probe, ProbeOutcome, SearchSettings, TargetAnswer
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
            passed = {
                rate
                for rate, outcome in mine.items()
                if outcome.valid and outcome.num_offered and (outcome.attainment or 0) >= answer.target
            }
            lowest_failure = min(set(mine) - passed, default=math.inf)
            known = 0.0 if one.end is End.NOTHING_PASSED else None
            assert one.rate == max((rate for rate in passed if rate < lowest_failure), default=known)
            assert (one.failing_rate or math.inf) == lowest_failure
            assert (one.end is End.NOT_SEARCHED) is (not mine)
        with_rate = [one.rate for one in answer.seeds if one.rate is not None]
        assert answer.rate == (pytest.approx(sum(with_rate) / len(with_rate)) if with_rate else None)
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


def test_nothing_passes() -> None:
    search = run_search(settings_of(start_rate=4.0, min_rate=0.5), lambda probe: 0.0)
    answer = search.answers()[0]
    assert answer.rate == 0.0
    assert (answer.attainment_low, answer.attainment_high) == (None, None)
    assert {one.end for one in answer.seeds} == {End.NOTHING_PASSED}
    assert not answer.is_converged
    assert "0.5 req/s; the answer is 0" in answer.notes[0]
    # Halving from 4 to 0.5, then later seeds try the lowest rate at once; the second target needs no probe.
    assert [probe.rate for probe, _ in search.log] == [4.0, 2.0, 1.0, 0.5, 0.5, 0.5]


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
    hint=st.none() | rates,
)
def test_a_proposal_lies_strictly_inside_the_bracket(
    passing: float | None, ratio: float, has_failing: bool, hint: float | None
) -> None:
    settings = settings_of()
    failing = min((passing or 1.0) * ratio, settings.max_rate) if has_failing else None
    rate = propose(passing, failing, hint, settings)
    assert (passing or 0.0) < rate < (failing or math.inf)
    assert settings.min_rate <= rate <= settings.max_rate


def test_answers_are_values() -> None:
    answer = run_search(settings_of(), step_at(3.0)).answers()[0]
    assert msgspec.convert(msgspec.to_builtins(answer), TargetAnswer) == answer
