"""`baton bench max-goodput`: options in, the search's dict and its measurements out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.cli_checks import check_unvaried, parse_numbers
from bench.load.cli_load import ARRIVALS, MEASURING, OUTPUT, LoadOptions
from bench.load.cli_options import option
from bench.load.cli_screen import say
from bench.load.cli_session import Session
from bench.load.cli_settings import parse_seconds, plan_settings, run_settings
from bench.load.figures.window import SteadyWindow, Window
from bench.load.goodput.console import opening_lines, probe_line
from bench.load.goodput.probing import find_max_goodput
from bench.load.goodput.search import GoodputSearch
from bench.load.goodput.values import Probe, ProbeOutcome, SearchSettings
from bench.load.plans.settings import PlanSettings, at_rate
from bench.load.results.result import SCHEMA_VERSION, SEARCH
from bench.load.runner import Measurement, RunSettings
from cluster.errors import ConfigError

DEFAULT_DURATION = "60s"
MAX_SEEDS = 100


@dataclass(frozen=True, kw_only=True)
class SearchOptions(LoadOptions):
    start_rate: float = option(1.0, "first rate to probe, requests per second", ARRIVALS)
    min_rate: float = option(0.01, "lowest rate to try", ARRIVALS)
    max_rate: float = option(10_000.0, "highest rate to try", ARRIVALS)
    targets: str = option("0.9,0.99", "shares of all offered requests that must meet every SLO", MEASURING)
    seeds: int = option(3, "repeat with this many seeds, from --seed on", MEASURING)
    tolerance: float = option(0.05, "stop when pass and fail differ by at most this share", MEASURING)
    max_probes: int = option(60, "at most this many runs", MEASURING)
    out: Path | None = option(
        None, "result file (JSON): answers, every probe, and the result of each", OUTPUT
    )


@dataclass(frozen=True, slots=True)
class Search:
    """A search, checked and ready to begin."""

    settings: SearchSettings
    plan: PlanSettings
    how: RunSettings
    duration_s: float

    @classmethod
    def of(cls, given: SearchOptions) -> Search:
        """
        Raises:
            ConfigError: no SLO, a load that has no rate, or a setting that cannot work.
        """
        if given.slo is None:
            raise ConfigError(
                "max-goodput needs SLOs to hold requests against: give --slo ttft=200ms,tpot=50ms"
            )
        if given.requests is not None:
            raise ConfigError("max-goodput offers each rate for --duration: leave --requests out.")
        if given.keep_text:
            raise ConfigError("max-goodput keeps no file of requests: leave --keep-text out.")
        check_unvaried(given, "max-goodput")
        if not 1 <= given.seeds <= MAX_SEEDS:
            raise ConfigError(f"--seeds {given.seeds}: give a number of seeds from 1 to {MAX_SEEDS}.")
        settings = SearchSettings(
            start_rate=given.start_rate,
            min_rate=given.min_rate,
            max_rate=given.max_rate,
            targets=tuple(parse_numbers("--targets", given.targets)),
            seeds=tuple(range(given.seed, given.seed + given.seeds)),
            tolerance=given.tolerance,
            max_probes=given.max_probes,
        )
        duration_s = parse_seconds("--duration", given.duration or DEFAULT_DURATION)
        plan = plan_settings(given, rate=given.start_rate, duration_s=duration_s, random_offset=True)
        at_rate(plan, given.start_rate, given.seed, 0)
        how = run_settings(given, probe_duration_s=duration_s)
        _check_first_probe(given.start_rate, duration_s, how.window)
        return cls(settings, plan, how, duration_s)

    def run(self, session: Session, label: str | None) -> tuple[dict[str, Any], list[Measurement]]:
        """The search's dict, with what it was made of, and every measurement.

        Raises:
            BatonError: a plan that cannot be built.
        """
        plan = session.fit(self.plan)

        def measure(probe: Probe, number: int) -> Measurement:
            aimed = at_rate(plan, probe.rate, probe.seed, plan.salt + number)
            title = f"probe {number + 1}: {probe.rate:.4g} req/s, seed {probe.seed}"
            return session.measure(aimed, self.how, title=title)

        session.check([at_rate(plan, self.settings.start_rate, self.settings.seeds[0], plan.salt)])
        say(opening_lines(self.settings, self.duration_s, self.how.window))
        found, measured = find_max_goodput(self.settings, measure, _tell)
        first = measured[0].result if measured else {}
        kept = (
            *("model_id", "backend", "slos_ms", "workload", "trace", "window"),
            *("server", "environment", "date"),
        )
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": SEARCH,
            "label": label,
            "url": session.target.url,
            "duration_s": self.duration_s,
            **{key: first.get(key) for key in kept},
            **found,
            "runs": [
                {key: value for key, value in one.result.items() if key != "timeslices"} for one in measured
            ],
        }, measured


def _check_first_probe(rate: float, duration_s: float, window: Window | SteadyWindow) -> None:
    """
    Raises:
        ConfigError: it would most likely offer nothing.
    """
    measured_s = duration_s
    if isinstance(window, Window):
        measured_s -= window.warmup_s + window.cooldown_s
    if rate * measured_s < 1:
        raise ConfigError(
            f"--start-rate {rate:g} offers less than one request in the {measured_s:.3g} s that a probe "
            "measures: give a higher one, or a longer --duration."
        )


def _tell(probe: Probe, outcome: ProbeOutcome, state: GoodputSearch) -> None:
    say([probe_line(probe, outcome, state)])
