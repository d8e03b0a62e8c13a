"""The headline number: the highest rate at which enough of the requests are inside all SLOs. Pure, no clock,
no IO.

1. `next()` says the (rate, seed) to probe; the runner offers that load and `report()`s the attainment.
2. Each seed has its own bracket per target. The first seed starts from `start_rate`: steps of `growth` lead
   up; down they grow from step to step, so that a first rate far too high costs few probes. Bisection on the
   log of the rate then narrows the bracket to the tolerance.
3. Every outcome serves every target: the probes of 90 % bracket the search for 99 %, which goes on from the
   rate that 90 % ended at.
4. Each later seed starts from the mean of the earlier answers, in steps that begin at the tolerance and
   double: seeds that agree cost two probes, one at each end of the bracket.
5. The order is what is worth most first: the first seed's answer to every target; then the other seeds' to
   the lowest target; then theirs to the next. A search that runs out of probes has an answer for each target.
   Where the first seed ends below `one_seed_below`, it is enough.
6. `answers()` gives, per target, the mean over the seeds that ended (`values.figure_of`), the bracket of
   their rates, and with three seeds or more a confidence interval (`values.TargetAnswer`).

The rule under noise, since attainment does not fall evenly with the rate: a rate passes if its attainment is
at least the target. Of one seed's outcomes the answer is the highest passing rate **below the lowest failing
one**; a pass above a failure is luck and does not count. So an unlucky failure lowers the answer and a lucky
pass does not raise it; other seeds and the interval show how much of that there was. A bracket that has ended
stands: a probe of another target that contradicts it later is told, and does not undo it.

A target that fails at `min_rate` has the answer 0: a finding, too. Where requests hardly overlap at that rate
(`alone_at_min_rate`), it is out of reach at any rate.

A probe whose run was invalid (the client lagged, the run broke off) is repeated once. Invalid again, it
counts as not passing: what the client could not offer properly cannot be claimed. Notes say so.

It always ends: each outcome narrows a bracket by at least half the tolerance or ends it, rates stay within
`min_rate` and `max_rate`, and `max_probes` bounds all probes together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.load.figures.intervals import mean_half_width, wilson
from bench.load.goodput.values import (
    DONE,
    MIN_SEEDS,
    NOTHING,
    End,
    Probe,
    ProbeOutcome,
    SearchSettings,
    SeedAnswer,
    TargetAnswer,
    figure_of,
    seed_notes,
)
from cluster.errors import BatonError

ROUNDING = 1e-9  # relative; two rates closer than this are one


class _Bracket(msgspec.Struct, frozen=True):
    """Highest passing rate below the lowest failing one."""

    passing: float | None
    failing: float | None


class GoodputSearch:
    """Owns the outcomes; everything else follows from them."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self._outcomes: dict[Probe, ProbeOutcome] = {}  # the last one of each probe
        self._repeated: set[Probe] = set()
        self._log: list[tuple[Probe, ProbeOutcome]] = []

    @property
    def log(self) -> tuple[tuple[Probe, ProbeOutcome], ...]:
        """All probes in the order they were run, repeats too."""
        return tuple(self._log)

    def next(self) -> Probe | None:
        """The probe to run now; the same one until it is reported. None: the search is over."""
        if len(self._log) >= self.settings.max_probes:
            return None
        if self._log and self._must_repeat(self._log[-1][0]):
            return self._log[-1][0]
        for target, seed in self._order():
            rate = self._next_rate(target, seed)
            if rate is not None:
                return Probe(rate, seed)
        return None

    def _order(self) -> list[tuple[float, int]]:
        targets = sorted(self.settings.targets)
        first, *others = self._wanted_seeds()
        return [(target, first) for target in targets] + [(t, seed) for t in targets for seed in others]

    def _wanted_seeds(self) -> tuple[int, ...]:
        """The first alone, once it has ended far below what is worth more seeds."""
        settings = self.settings
        bracket = self._bracket(min(settings.targets), settings.seeds[0])
        is_enough = _end(bracket, settings) in DONE and (bracket.passing or 0.0) < settings.one_seed_below
        return settings.seeds[:1] if is_enough else settings.seeds

    def report(self, probe: Probe, outcome: ProbeOutcome) -> None:
        """Take the outcome of the probe that `next` gave.

        Raises:
            BatonError: another probe is due, or the outcome is not one.
        """
        due = self.next()
        if probe != due:
            raise BatonError(f"max-goodput search: {probe} was reported, but {due} is due")
        if outcome.attainment is not None and not 0 <= outcome.attainment <= 1:  # NaN too
            raise BatonError(
                f"max-goodput search: attainment {outcome.attainment} is not a share from 0 to 1"
            )
        if probe in self._outcomes:
            self._repeated.add(probe)
        self._outcomes[probe] = outcome
        self._log.append((probe, outcome))

    def answers(self) -> tuple[TargetAnswer, ...]:
        """One per target, from what is known now."""
        return tuple(self._answer(target) for target in self.settings.targets)

    def _must_repeat(self, probe: Probe) -> bool:
        return not _is_measured(self._outcomes[probe]) and probe not in self._repeated

    def _passes(self, probe: Probe, target: float) -> bool:
        outcome = self._outcomes[probe]
        return _is_measured(outcome) and (outcome.attainment or 0.0) >= target - ROUNDING

    def _bracket(self, target: float, seed: int) -> _Bracket:
        """As the probes narrowed it one after another, until it had ended."""
        bracket = _Bracket(None, None)
        passed: list[float] = []
        for probe in self._outcomes:
            if probe.seed != seed or _end(bracket, self.settings) is not None:
                continue
            failing = bracket.failing
            if self._passes(probe, target):
                passed.append(probe.rate)
            elif failing is None or probe.rate < failing:
                failing = probe.rate
            below = (rate for rate in passed if failing is None or rate < failing)
            bracket = _Bracket(max(below, default=None), failing)
        return bracket

    def _hint(self, target: float, seed: int) -> float | None:
        """Where the earlier seeds ended, on average; None for the first seed."""
        earlier = self.settings.seeds[: self.settings.seeds.index(seed)]
        if not earlier:
            return None
        rate = statistics.fmean(self._bracket(target, other).passing or 0.0 for other in earlier)
        return min(max(rate, self.settings.min_rate), self.settings.max_rate)

    def _start(self, target: float, seed: int) -> tuple[float, float]:
        """The rate that this search starts from, and the factor of its first step away from it: near the
        earlier seeds' answers; else from where this seed passed an easier target; else `start_rate`.
        """
        settings = self.settings
        hint = self._hint(target, seed)
        if hint is not None:
            return hint, 1 + settings.tolerance
        easier = [self._bracket(other, seed).passing for other in settings.targets if other < target]
        return min(
            (rate for rate in easier if rate is not None), default=settings.start_rate
        ), settings.growth

    def _next_rate(self, target: float, seed: int) -> float | None:
        settings, bracket = self.settings, self._bracket(target, seed)
        if _end(bracket, settings) is not None:
            return None
        anchor, first_step = self._start(target, seed)
        return propose(bracket.passing, bracket.failing, anchor, first_step, settings)

    def notes(self) -> tuple[str, ...]:
        """What holds for every target: seeds left out, too few seeds, probes that could not be measured."""
        settings, num = self.settings, len(self._searched_seeds())
        missing = [seed for seed in settings.seeds if seed not in self._searched_seeds()]
        why = ""
        if missing and len(self._wanted_seeds()) < len(settings.seeds):
            why = f" (the first one ended below {settings.one_seed_below:.3g} req/s, which is enough)"
        notes = [f"Not searched, so in no figure: {_seeds(missing)}{why}."] if missing else []
        if num < MIN_SEEDS:
            notes.append(
                f"{num} seed{'' if num == 1 else 's'} searched: an interval needs {MIN_SEEDS} or more; "
                "the bracket of passing and failing rates stands in for it."
            )
        return (*notes, *self._unmeasured_notes())

    def _searched_seeds(self) -> frozenset[int]:
        return frozenset(probe.seed for probe in self._outcomes)

    def _answer(self, target: float) -> TargetAnswer:
        seeds = tuple(self._seed_answer(target, seed) for seed in self.settings.seeds)
        searched = [one for one in seeds if one.end is not End.NOT_SEARCHED]
        figure = figure_of(seeds)
        counted = [one for one in searched if one.seed in figure.seeds] or searched
        highs = [one.failing_rate for one in counted if one.failing_rate is not None]
        ci_low, ci_high = _interval(searched)
        num_offered = sum(one.num_offered for one in counted)
        num_good = sum((one.attainment or 0.0) * one.num_offered for one in counted)
        share = wilson(num_good, num_offered)
        return TargetAnswer(
            target=target,
            rate=figure.rate,
            is_lower_bound=figure.is_lower_bound,
            num_seeds_searched=len(searched),
            bracket_low=min((one.rate or 0.0 for one in counted), default=None),
            bracket_high=max(highs) if highs and len(highs) == len(counted) else None,
            ci_low=ci_low,
            ci_high=ci_high,
            attainment_low=None if share is None else share[0],
            attainment_high=None if share is None else share[1],
            seeds=seeds,
            is_converged=all(one.end in DONE for one in seeds if one.seed in self._wanted_seeds()),
            notes=(*seed_notes(target, seeds, self.settings, len(self._log)), *self._contradictions(target)),
        )

    def _contradictions(self, target: float) -> list[str]:
        """Probes of another target that fell short below a bracket that had ended: told, and in no figure."""
        return [
            f"Seed {probe.seed}: {probe.rate:.4g} req/s, probed later for another target, reached "
            f"{outcome.attainment:.1%} only; the bracket above it stands."
            for probe, outcome in self._outcomes.items()
            if _is_measured(outcome)
            and not self._passes(probe, target)
            and probe.rate <= (self._bracket(target, probe.seed).passing or 0.0)
        ]

    def _seed_answer(self, target: float, seed: int) -> SeedAnswer:
        bracket = self._bracket(target, seed)
        outcome = None if bracket.passing is None else self._outcomes[Probe(bracket.passing, seed)]
        failed = None if bracket.failing is None else self._outcomes[Probe(bracket.failing, seed)]
        failing_attainment = failed.attainment if failed is not None and _is_measured(failed) else None
        is_searched = seed in self._searched_seeds()
        end = (_end(bracket, self.settings) or End.UNFINISHED) if is_searched else End.NOT_SEARCHED
        if end in NOTHING and failing_attainment is None:
            end = End.UNFINISHED  # what could not be measured is no finding
        return SeedAnswer(
            seed=seed,
            rate=0.0 if end in NOTHING else bracket.passing,
            failing_rate=bracket.failing,
            attainment=None if outcome is None else outcome.attainment,
            num_offered=0 if outcome is None else outcome.num_offered,
            end=end,
            failing_attainment=failing_attainment,
            failing_num_offered=0 if failed is None else failed.num_offered,
        )

    def _unmeasured_notes(self) -> list[str]:
        return [
            f"Seed {probe.seed}: the probe at {probe.rate:.4g} req/s was invalid"
            f"{' twice' if probe in self._repeated else ''} and counts as not passing."
            for probe, outcome in self._outcomes.items()
            if not _is_measured(outcome)
        ]


def _interval(searched: Sequence[SeedAnswer]) -> tuple[float | None, float | None]:
    """As `TargetAnswer` tells."""
    lows = [one.rate for one in searched if one.end is End.FOUND and one.rate is not None]
    highs = [one.failing_rate for one in searched if one.end is End.FOUND and one.failing_rate is not None]
    low_half, high_half = mean_half_width(lows), mean_half_width(highs)
    if len(lows) < max(MIN_SEEDS, len(searched)) or low_half is None or high_half is None:
        return None, None
    return max(0.0, statistics.fmean(lows) - low_half), statistics.fmean(highs) + high_half


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def propose(
    passing: float | None,
    failing: float | None,
    anchor: float,
    first_step: float,
    settings: SearchSettings,
) -> float:
    """The rate to probe in an open bracket; lies strictly inside it.

    The anchor comes first, unless a bound is already there. Then steps lead away from it, up after a pass and
    down after a failure: they begin at the factor `first_step` and double on the log scale, up to `growth` on
    the way up and without end on the way down, for an overload costs more time than a rate too low. No step
    goes past the middle of the bracket on the log scale, so in the end it is bisected.
    """
    near = math.sqrt(1 + settings.tolerance)
    if (passing is None or passing * near < anchor) and (failing is None or anchor * near < failing):
        return anchor
    middle = None if passing is None or failing is None else math.sqrt(passing * failing)
    if passing is not None and (failing is None or anchor <= passing * near):
        step = min(settings.growth, first_step * max(1.0, passing / anchor))
        return min(passing * step, settings.max_rate if middle is None else middle)
    assert failing is not None  # else the anchor or a step up was returned
    step = first_step * max(1.0, anchor / failing)
    return max(failing / step, settings.min_rate if middle is None else middle)


def _end(bracket: _Bracket, settings: SearchSettings) -> End | None:
    passing, failing = bracket.passing, bracket.failing
    if passing is not None and failing is not None:
        return End.FOUND if failing <= passing * (1 + settings.tolerance) * (1 + ROUNDING) else None
    if passing is not None and passing >= settings.max_rate:
        return End.MAX_RATE
    if failing is not None and failing <= settings.min_rate:
        return End.OUT_OF_REACH if settings.alone_at_min_rate else End.NOTHING_PASSED
    return None


def _is_measured(outcome: ProbeOutcome) -> bool:
    return outcome.valid and outcome.attainment is not None and outcome.num_offered > 0


def to_dict(search: GoodputSearch) -> dict[str, Any]:
    """Settings, answers, notes and all probes in order, fit for JSON."""
    return {
        "settings": msgspec.to_builtins(search.settings),
        "answers": msgspec.to_builtins(search.answers()),
        "notes": list(search.notes()),
        "probes": [
            {**msgspec.to_builtins(probe), **msgspec.to_builtins(outcome)} for probe, outcome in search.log
        ],
    }
