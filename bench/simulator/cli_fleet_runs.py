"""The runs and searches of `baton simulate --trace`: shown as they end, then summed up for the result.

Ctrl-C ends them, not the command: what has ended by then is told and written, as incomplete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from bench.load.goodput.search import to_dict
from bench.load.goodput.values import DONE, SeedAnswer
from bench.simulator.cli_screen import Progress, line, warn
from bench.simulator.fleet.search import new_search, probes
from bench.simulator.fleet.trial import Outcome, Setup, lengthened, run_trial
from cluster.readable import plural

OUT_OF_REACH = "No rate meets the SLO: the targets are out of reach for this pool and trace."


@dataclass(frozen=True, slots=True)
class Summary:
    """`content` is what goes into the result; None: nothing had ended when the user left."""

    content: dict[str, Any] | None
    is_complete: bool


def serve(setup: Setup, rate: float, seeds: range) -> Summary:
    """One run per seed at one rate."""
    progress = Progress()
    outcomes: list[Outcome] = []
    with contextlib.suppress(KeyboardInterrupt):
        for seed in seeds:
            outcomes.append(run_trial(setup, rate, seed, _teller(progress, setup, rate, seed)))
            _show(outcomes[-1], progress)
    progress.clear()
    is_complete = len(outcomes) == len(seeds)
    if not is_complete:
        warn(f"Interrupted: {len(outcomes)} of {plural(len(seeds), 'run')} had ended.")
    if not outcomes:
        return Summary(None, False)
    content = {
        "rate": rate,
        "slo_attainment": fmean(one.attainment for one in outcomes),
        "slo_attainment_per_seed": [one.attainment for one in outcomes],
        "goodput": fmean(one.goodput for one in outcomes),
        "goodput_per_seed": [one.goodput for one in outcomes],
        "runs": [msgspec.to_builtins(one) for one in outcomes],
        "seeds": [one.seed for one in outcomes],
    }
    return Summary(content, is_complete)


def search(setup: Setup, seeds: range, start: float | None) -> Summary:
    """The highest rate within the SLO, per seed. The figure is the mean of the seeds whose search ended."""
    found, progress = new_search(setup, seeds, start), Progress()
    outcomes: list[Outcome] = []

    def told(rate: float, seed: int, share: float) -> None:
        _teller(progress, setup, rate, seed)(share)

    with contextlib.suppress(KeyboardInterrupt):
        for outcome in probes(found, setup, told):
            outcomes.append(outcome)
            _show(outcome, progress)
    progress.clear()
    (answer,) = found.answers()
    is_complete = found.next() is None
    ended = [one for one in answer.seeds if one.end in DONE]
    if not is_complete:
        warn(f"Interrupted: {len(ended)} of {plural(len(answer.seeds), 'seed')} searched to the end.")
    if answer.rate is None:
        return Summary(None, is_complete)
    counted = ended or [one for one in answer.seeds if one.rate is not None]
    per_seed = [one.rate or 0.0 for one in counted]
    per_worker = answer.rate / len(setup.pool)
    line(
        f"{setup.policy.text}: {'at least ' if answer.is_lower_bound else ''}{answer.rate:.4g} req/s "
        f"({per_worker:.3g} per worker; seeds: {', '.join(f'{rate:.4g}' for rate in per_seed)})"
    )
    passing = [rate for rate in per_seed if rate > 0]
    notes = [*answer.notes, *lengthened(setup, passing or [one.rate for one in outcomes])]
    notes += [] if passing else [OUT_OF_REACH]
    for note in notes:
        warn(note)
    runs = [_run_of(one, outcomes) for one in counted]
    passed = [one.attainment for one in runs if one is not None]
    content = {
        "max_goodput": answer.rate,
        "is_lower_bound": answer.is_lower_bound,
        "max_goodput_per_seed": per_seed,
        "max_goodput_per_worker": per_worker,
        "slo_attainment": fmean(passed) if passed else 0.0,
        "slo_attainment_per_seed": [None if one is None else one.attainment for one in runs],
        "runs": [msgspec.to_builtins(one) for one in runs if one is not None],
        "search": to_dict(found),
        "seeds": [one.seed for one in counted],
        "notes": [*found.notes(), *notes],
    }
    return Summary(content, is_complete)


def _run_of(answer: SeedAnswer, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The run at the seed's answer."""
    return next((one for one in outcomes if one.seed == answer.seed and one.rate == answer.rate), None)


def _teller(progress: Progress, setup: Setup, rate: float, seed: int) -> Callable[[float], None]:
    return lambda share: progress.update(
        lambda: f"seed {seed}: {rate:8.4g} req/s  {share:4.0%} of {setup.num_requests(rate):,} requests..."
    )


def _show(outcome: Outcome, progress: Progress) -> None:
    progress.clear()
    ttft, tpot = outcome.distributions["ttft"], outcome.distributions["tpot"]
    line(
        f"seed {outcome.seed}: {outcome.rate:8.4g} req/s  {outcome.attainment:6.1%} within the SLO  "
        f"TTFT p90 {_ms(ttft['p90_s'])}  TPOT p90 {_ms(tpot['p90_s'])}  "
        f"({outcome.num_offered:,} requests, {outcome.wall_s:.1f} s)"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
