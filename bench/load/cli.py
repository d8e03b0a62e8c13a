"""`baton bench`: the load test on the command line.

`run` measures one load, `sweep` one load at several rates, `max-goodput` searches the highest rate that
meets the SLOs; `report` and `compare` look at result files; `mock` is a server of scripted timings to measure
against.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from bench.load.cli_load import (
    ARRIVALS,
    MEASURING,
    LoadOptions,
    Session,
    parse_seconds,
    plan_settings,
    run_settings,
)
from bench.load.cli_options import option, options
from bench.load.goodput.console import answer_lines, opening_lines, probe_line
from bench.load.goodput.probing import find_max_goodput
from bench.load.goodput.search import GoodputSearch
from bench.load.goodput.values import Probe, ProbeOutcome, SearchSettings
from bench.load.plans.settings import at_rate
from bench.load.report import ReportRun, ReportSearch, render_report
from bench.load.results.compare import as_text, compare_results
from bench.load.results.files import check_output, json_safe, write_atomically
from bench.load.results.result import read_result, read_run, write_result
from bench.load.results.summary_text import summary_lines
from bench.load.runner import Measurement
from cluster.errors import ConfigError

INTERRUPTED = 130

app = typer.Typer(
    name="bench",
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LoadOptions):
    rates: str = option("1,2,4,8", "mean requests per second, one run each", ARRIVALS)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(LoadOptions):
    start_rate: float = option(1.0, "first rate to probe, requests per second", ARRIVALS)
    min_rate: float = option(0.01, "lowest rate to try", ARRIVALS)
    max_rate: float = option(10_000.0, "highest rate to try", ARRIVALS)
    targets: str = option("0.9,0.99", "shares of all offered requests that must meet every SLO", MEASURING)
    seeds: int = option(3, "repeat with this many seeds, from --seed on", MEASURING)
    tolerance: float = option(0.05, "stop when pass and fail differ by at most this share", MEASURING)
    max_probes: int = option(60, "at most this many runs", MEASURING)


@app.command()
@options(LoadOptions)
def run(given: LoadOptions) -> None:
    """Offer one load and report what came back."""
    session = Session.open(given)
    if given.out is not None:
        check_output(given.out)
    measurement = session.measure(
        plan_settings(given, session.model, session.max_model_len), run_settings(given)
    )
    _print(summary_lines(measurement.result))
    if given.out is not None:
        write_result(given.out, measurement.result, measurement.run)
        _print([f"written: {given.out}"])
    _write_report(given.report, [measurement])
    _exit_if_interrupted([measurement])


@app.command()
@options(SweepOptions)
def sweep(given: SweepOptions) -> None:
    """The same load at several rates. OUT.json becomes OUT.rate-R.json for each rate R."""
    rates = _numbers("--rates", given.rates)
    session = Session.open(given)
    settings = plan_settings(given, session.model, session.max_model_len, rate=rates[0])
    measured: list[Measurement] = []
    for number, rate in enumerate(rates):
        aimed = at_rate(settings, rate, settings.seed, settings.salt + number)
        measurement = session.measure(aimed, run_settings(given), title=f"{rate:g} req/s")
        measured.append(measurement)
        _print([f"--- {rate:g} req/s", *summary_lines(measurement.result)])
        if given.out is not None:
            path = given.out.with_name(f"{given.out.stem}.rate-{rate:g}.json")
            write_result(path, measurement.result, measurement.run)
            _print([f"written: {path}"])
        if not measurement.run.is_complete:
            break
    _write_report(given.report, measured)
    _exit_if_interrupted(measured)


@app.command(name="max-goodput")
@options(SearchOptions)
def max_goodput(given: SearchOptions) -> None:
    """The highest rate at which 90 % (and 99 %) of all offered requests meet every SLO.

    Bisection over rates, for several seeds. Each probe offers the load for --duration (60 s); its first sixth
    is warm-up unless --warmup or --steady says otherwise.
    """
    search_settings = SearchSettings(
        start_rate=given.start_rate,
        min_rate=given.min_rate,
        max_rate=given.max_rate,
        targets=tuple(_numbers("--targets", given.targets)),
        seeds=tuple(range(given.seed, given.seed + given.seeds)),
        tolerance=given.tolerance,
        max_probes=given.max_probes,
    )
    found, measured = search(given, search_settings, Session.open(given))
    _print(answer_lines(found))
    if given.out is not None:
        write_atomically(given.out, [orjson.dumps(json_safe(found), option=orjson.OPT_INDENT_2)])
        _print([f"written: {given.out}"])
    _write_report(given.report, measured, found)
    if not found["is_complete"]:
        raise typer.Exit(INTERRUPTED)


def search(
    given: LoadOptions, search_settings: SearchSettings, session: Session
) -> tuple[dict[str, Any], list[Measurement]]:
    """The search's dict, with what it was made of, and every measurement.

    Raises:
        ConfigError: no SLO, or a load that has no rate.
    """
    if given.slo is None:
        raise ConfigError("max-goodput needs SLOs to hold requests against: give --slo ttft=200ms,tpot=50ms")
    if given.requests is not None:
        raise ConfigError("max-goodput offers each rate for --duration: leave --requests out.")
    duration_s = parse_seconds("--duration", given.duration or "60s")
    settings = plan_settings(
        given,
        session.model,
        session.max_model_len,
        rate=search_settings.start_rate,
        duration_s=duration_s,
        random_offset=True,
    )
    how = run_settings(given, probe_duration_s=duration_s)

    def measure(probe: Probe, number: int) -> Measurement:
        aimed = at_rate(settings, probe.rate, probe.seed, settings.salt + number)
        return session.measure(
            aimed, how, title=f"probe {number + 1}: {probe.rate:.4g} req/s, seed {probe.seed}"
        )

    def on_probe(probe: Probe, outcome: ProbeOutcome, state: GoodputSearch) -> None:
        _print([probe_line(probe, outcome, state)])

    _print(opening_lines(search_settings, duration_s, how.window))
    found, measured = find_max_goodput(search_settings, measure, on_probe)
    first = measured[0].result if measured else {}
    kept = ("model_id", "backend", "slos_ms", "workload", "trace", "window", "server", "environment", "date")
    found |= {"label": given.label, "url": session.target.url, "duration_s": duration_s} | {
        key: first.get(key) for key in kept
    }
    found["runs"] = [
        {key: value for key, value in one.result.items() if key != "timeslices"} for one in measured
    ]
    return found, measured


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="result files of `run` and `sweep`")],
    out: Annotated[Path, typer.Option(help="HTML file to write")] = Path("report.html"),
) -> None:
    """One self-contained HTML page from result files."""
    runs = [ReportRun(read_result(path), read_run(path)) for path in results]
    _write_text(out, render_report(runs))


@app.command()
def compare(results: Annotated[list[Path], typer.Argument(help="two or more result files")]) -> None:
    """Result files side by side, with ratios to the first."""
    if len(results) < 2:
        raise ConfigError("compare needs two or more result files")
    comparison = compare_results([read_result(path) for path in results], [path.stem for path in results])
    _print([as_text(comparison)])


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def mock(context: typer.Context) -> None:
    """An OpenAI-compatible server with scripted timings and faults, to test load tests against."""
    from bench.load.mock.process import main as serve_mock

    raise typer.Exit(serve_mock(context.args))


def _write_report(
    path: Path | None, measured: list[Measurement], found: dict[str, Any] | None = None
) -> None:
    if path is not None:
        searches = [] if found is None else [ReportSearch(found["url"], found)]
        _write_text(path, render_report([ReportRun(one.result, one.run) for one in measured], searches))


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, [text.encode()])
    _print([f"written: {path}"])


def _exit_if_interrupted(measured: list[Measurement]) -> None:
    if not all(one.run.is_complete for one in measured):
        raise typer.Exit(INTERRUPTED)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: give numbers with commas between them, such as 1,2,4.") from None


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
