"""What a person reads of a search: how it will measure, a line per probe, and its answers. Pure.

1. `opening_lines`, once: what each probe measures, and what it leaves out.
2. `probe_line` after each probe: its outcome, and what is known so far of each target.
3. `answer_lines` at the end, from the search's dict; notes that hold for every target come once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.load.figures.window import SteadyWindow, Window
from bench.load.goodput.doubts import invalid_ends, unanswered
from bench.load.goodput.forecast import likely_probes
from bench.load.goodput.search import GoodputSearch
from bench.load.goodput.values import (
    NOTHING,
    End,
    Probe,
    ProbeOutcome,
    SearchSettings,
    SeedAnswer,
    TargetAnswer,
    figure_of,
)


def opening_lines(settings: SearchSettings, duration_s: float, window: Window | SteadyWindow) -> list[str]:
    """Before the first probe."""
    named = ", ".join(map(str, settings.seeds))
    seeds = f"Seeds {named}, one after another" if len(settings.seeds) > 1 else f"Seed {named}"
    fewest, most = likely_probes(settings)
    times = f"{most}" if fewest == most else f"{fewest} to {most}"
    load = _span_words(fewest * duration_s, most * duration_s)
    limit_s = settings.max_probes * duration_s
    return [
        f"Each probe offers its rate for {duration_s:g} s; {_window_words(window)}.",
        f"{seeds}: about {times} probe{'' if most == 1 else 's'}, {load} of load and the time to answer it.",
        f"--max-probes {settings.max_probes} ends it after {_span_words(limit_s, limit_s)} of load; "
        "--duration, --seeds and --tolerance make it shorter.",
    ]


def _span_words(least_s: float, most_s: float) -> str:
    unit_s, unit = (60.0, "min") if most_s >= 120 else (1.0, "s")
    ends = dict.fromkeys(f"{seconds / unit_s:.3g}" for seconds in (least_s, most_s))
    return f"{' to '.join(ends)} {unit}"


def _window_words(window: Window | SteadyWindow) -> str:
    if isinstance(window, SteadyWindow):
        return "requests outside the steady part are left out"
    parts = [f"of the first {window.warmup_s:.4g} s are warm-up"] if window.warmup_s else []
    parts += [f"of the last {window.cooldown_s:.4g} s are cool-down"] if window.cooldown_s else []
    return f"requests {' and '.join(parts)} and not measured" if parts else "all requests are measured"


def probe_line(probe: Probe, outcome: ProbeOutcome, state: GoodputSearch) -> str:
    """The last probe reported to `state`."""
    attained = "nothing offered" if outcome.attainment is None else f"{outcome.attainment:.1%} good"
    is_repeat = sum(earlier == probe for earlier, _ in state.log) > 1
    mark = ", repeated" if is_repeat else ""
    if not outcome.valid or outcome.attainment is None:
        mark = ", INVALID again: counts as not passing" if is_repeat else ", INVALID: will be repeated"
    best = ", ".join(f"{one.target:.0%}: {so_far(one)}" for one in state.answers())
    return (
        f"{probe.rate:8.4g} req/s  seed {probe.seed}  {attained} of {outcome.num_offered}{mark}"
        f"   so far {best}"
    )


def so_far(answer: TargetAnswer) -> str:
    """`≥ 1 (seed 0)`, `1.41 (seeds 0, 1)`, `none passed`."""
    if answer.rate is None:
        return "none passed"
    seeds = figure_of(answer.seeds).seeds
    which = f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
    return f"{'≥ ' if answer.is_lower_bound else ''}{answer.rate:.4g} ({which})"


def answer_lines(found: Mapping[str, Any]) -> list[str]:
    """From `search.to_dict` with `is_complete` and `duration_s`."""
    lines = [] if found["is_complete"] else ["INCOMPLETE: the search was cut short; this is what it knows"]
    if found["is_complete"] and (missing := unanswered(found)):
        named = ", ".join(f"{target:.0%}" for target in missing)
        lines.append(f"INCOMPLETE: no answer yet at {named}: the notes of each say what ended its search")
    if ends := invalid_ends(found):
        lines.append(f"INVALID: an answer rests on probes that the client could not offer: {'; '.join(ends)}")
    for answer in msgspec.convert(found["answers"], tuple[TargetAnswer, ...]):
        lines.append(f"max goodput at {answer.target:.0%} attainment: {answer_words(answer)}")
        searched = [one for one in answer.seeds if one.end is not End.NOT_SEARCHED]
        lines += [f"  {seed_words(one)}" for one in searched if len(searched) > 1]
        lines += [f"  {note}" for note in answer.notes]
    lines += [f"note: {note}" for note in found["notes"]]
    num = len(found["probes"])
    lines.append(f"{num} probe{'' if num == 1 else 's'} of {found['duration_s']:g} s each")
    return lines


def seed_words(one: SeedAnswer) -> str:
    """`seed 1: 2 req/s passed, 2.1 failed; converged`."""
    passed = "nothing passed" if not one.rate else f"{one.rate:.4g} req/s passed"
    failed = "none failed" if one.failing_rate is None else f"{one.failing_rate:.4g} failed"
    return f"seed {one.seed}: {passed}, {failed}; {'' if one.is_converged else 'not '}converged"


def answer_words(answer: TargetAnswer) -> str:
    """`at least 1 req/s (seed 0 only)`; `3.91 req/s (mean of 3 seeds; between 3.9 that passed and …)`."""
    searched = [one for one in answer.seeds if one.end is not End.NOT_SEARCHED]
    counted = figure_of(answer.seeds).seeds
    if answer.rate is None:
        return f"unknown, no rate has passed so far ({_which([one.seed for one in searched], answer)})"
    if searched and all(one.end in NOTHING for one in searched):
        return f"not reached at any rate, down to {answer.bracket_high:.4g} req/s ({_which(counted, answer)})"
    rate = f"{'at least ' if answer.is_lower_bound else ''}{answer.rate:.4g} req/s"
    return f"{rate} ({'; '.join([_which(counted, answer), *_bounds(answer)])})"


def _which(counted: Sequence[int], answer: TargetAnswer) -> str:
    num, of = len(counted), len(answer.seeds)
    if num == of:
        return f"mean of {num} seeds" if num > 1 else f"seed {counted[0]}"
    if num == 1:
        return f"seed {counted[0]} only"
    return f"mean of {num} of {of} seeds" if num else "no seed was searched"


def _bounds(answer: TargetAnswer) -> list[str]:
    if answer.bracket_low is None or answer.bracket_high is None:
        return []
    low, high = f"{answer.bracket_low:.4g}", f"{answer.bracket_high:.4g}"
    parts = [f"between {low} that passed and {high} that failed"]
    if answer.ci_low is not None and answer.ci_high is not None:
        parts.append(
            f"95 % interval of the mean {answer.ci_low:.4g} to {answer.ci_high:.4g}: the bracket widened for "
            f"the spread of {answer.num_seeds_searched} seeds"
        )
    return parts
