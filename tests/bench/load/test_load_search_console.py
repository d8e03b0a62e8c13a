"""What a person reads of a search."""

from __future__ import annotations

from typing import Any

import pytest

from bench.load.figures.window import SteadyWindow, Window
from bench.load.goodput.console import answer_lines, opening_lines, probe_line
from bench.load.goodput.forecast import likely_probes
from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import ProbeOutcome, SearchSettings


def run_probes(search: GoodputSearch, *outcomes: tuple[float, bool]) -> list[str]:
    """Reports (attainment, valid) of the next probes; the lines that are printed."""
    lines = []
    for share, valid in outcomes:
        probe = search.next()
        assert probe is not None
        outcome = ProbeOutcome(attainment=share, num_offered=50, valid=valid)
        search.report(probe, outcome)
        lines.append(probe_line(probe, outcome, search))
    return lines


def found_of(search: GoodputSearch, is_complete: bool = True) -> dict[str, Any]:
    return {**to_dict(search), "is_complete": is_complete, "duration_s": 60.0}


@pytest.mark.parametrize(
    ("seeds", "max_probes", "about", "limit"),
    [
        ((0, 1, 2), 60, "Seeds 0, 1, 2, one after another: about 17 to 23 probes, 17 to 23 min", "60 min"),
        ((0, 1, 2), 9, "Seeds 0, 1, 2, one after another: about 9 probes, 9 min", "9 min"),
        ((7,), 1, "Seed 7: about 1 probe, 60 s", "60 s"),
    ],
)
def test_the_opening_foretells_the_time_and_names_what_bounds_it(
    seeds: tuple[int, ...], max_probes: int, about: str, limit: str
) -> None:
    settings = SearchSettings(start_rate=1.0, seeds=seeds, max_probes=max_probes)
    _, expected, bound = opening_lines(settings, 60.0, SteadyWindow())
    assert expected == f"{about} of load and the time to answer it."
    assert bound.startswith(f"--max-probes {max_probes} ends it after {limit} of load; --duration")


def test_many_seeds_are_foretold_from_a_few() -> None:
    """As many as they take, or nearly; told at once."""
    few = likely_probes(SearchSettings(start_rate=1.0, seeds=tuple(range(4)), max_probes=1000))
    many = likely_probes(SearchSettings(start_rate=1.0, seeds=tuple(range(100)), max_probes=1000))
    assert (many[0] - few[0], many[1] - few[1]) == (96 * 4, 96 * 4)


def test_an_answer_that_is_missing_is_told_first() -> None:
    search = GoodputSearch(SearchSettings(start_rate=1.0, seeds=(0,), max_probes=2))
    run_probes(search, (1.0, True), (0.95, True))
    lines = answer_lines(found_of(search))
    assert lines[0] == "INCOMPLETE: no answer yet at 90%, 99%: the notes of each say what ended its search"


def test_an_answer_that_rests_on_an_invalid_probe_is_told_first() -> None:
    settings = SearchSettings(
        start_rate=1.0, min_rate=0.5, max_rate=2.0, targets=(0.9,), tolerance=0.5, seeds=(0,)
    )
    search = GoodputSearch(settings)
    run_probes(search, (1.0, True), (1.0, False), (1.0, False), (1.0, True))
    assert search.next() is None
    assert answer_lines(found_of(search))[0].startswith("INVALID: an answer rests on probes")


def test_what_is_known_so_far_names_its_seeds() -> None:
    lines = run_probes(GoodputSearch(SearchSettings(start_rate=1.0)), (1.0, True))
    assert lines[0].endswith("100.0% good of 50   so far 90%: ≥ 1 (seed 0), 99%: ≥ 1 (seed 0)")
    lines = run_probes(GoodputSearch(SearchSettings(start_rate=1.0)), (0.0, True))
    assert lines[0].endswith("so far 90%: none passed, 99%: none passed")


def test_an_interrupted_search_claims_only_what_it_saw() -> None:
    search = GoodputSearch(SearchSettings(start_rate=1.0))
    run_probes(search, (1.0, True))
    lines = answer_lines(found_of(search, is_complete=False))
    assert lines[0].startswith("INCOMPLETE")
    assert "max goodput at 90% attainment: at least 1 req/s (seed 0 only)" in lines
    assert "note: Not searched, so in no figure: seeds 1, 2." in lines


def test_a_search_without_a_probe_says_that_nothing_is_known() -> None:
    lines = answer_lines(found_of(GoodputSearch(SearchSettings(start_rate=1.0)), is_complete=False))
    assert lines[1].endswith("unknown, no rate has passed so far (no seed was searched)")


def test_an_invalid_probe_and_its_repeat_are_marked() -> None:
    search = GoodputSearch(SearchSettings(start_rate=1.0))
    lines = run_probes(search, (1.0, False), (1.0, True), (1.0, False), (1.0, False))
    assert ", INVALID: will be repeated" in lines[0]
    assert ", repeated" in lines[1]
    assert "INVALID" not in lines[1]
    assert ", INVALID again: counts as not passing" in lines[3]


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(warmup_s=10.0), "requests of the first 10 s are warm-up and not measured"),
        (
            Window(warmup_s=5.0, cooldown_s=2.0),
            "of the first 5 s are warm-up and of the last 2 s are cool-down",
        ),
        (Window(), "all requests are measured"),
        (SteadyWindow(), "steady part"),
    ],
)
def test_the_window_is_told_before_the_first_probe(window: Window | SteadyWindow, words: str) -> None:
    assert words in opening_lines(SearchSettings(start_rate=1.0), 60.0, window)[0]


def test_notes_of_all_targets_come_once_and_the_interval_says_what_it_is() -> None:
    few = GoodputSearch(SearchSettings(start_rate=1.0, seeds=(0, 1)))
    while (probe := few.next()) is not None:
        few.report(probe, ProbeOutcome(attainment=float(probe.rate < 3), num_offered=50))
    text = "\n".join(answer_lines(found_of(few)))
    assert text.count("an interval needs 3 or more") == 1
    assert "(mean of 2 seeds; between 2.954 that passed and 3.101 that failed)" in text
    assert "95 % interval" not in text
    many = GoodputSearch(SearchSettings(start_rate=1.0))
    while (probe := many.next()) is not None:
        share = float(probe.rate < 3 + probe.seed / 3)
        many.report(probe, ProbeOutcome(attainment=share, num_offered=50))
    text = "\n".join(answer_lines(found_of(many)))
    assert "(mean of 3 seeds; between " in text
    assert ": the bracket widened for the spread of 3 seeds)" in text
