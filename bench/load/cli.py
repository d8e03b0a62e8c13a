"""`baton bench`: the load test on the command line.

`run` measures one load, `sweep` one load at several rates, `max-goodput` searches the highest rate that
meets the SLOs; `report` and `compare` look at result files; `mock` is a server of scripted timings to measure
against.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.load.cli_checks import check_outputs, check_unvaried, overwritten, parse_rates, slo_notes
from bench.load.cli_hints import HintingCommand, PlainCommand, PlainGroup
from bench.load.cli_load import ARRIVALS, MEASURING, LoadOptions
from bench.load.cli_options import option, options
from bench.load.cli_screen import note, say
from bench.load.cli_search import Search, SearchOptions
from bench.load.cli_session import Session, uninterrupted
from bench.load.cli_settings import plan_settings, run_settings
from bench.load.cli_status import EXIT_HELP, Status, exit_status, search_status
from bench.load.goodput.console import answer_lines
from bench.load.goodput.probing import server_lost
from bench.load.plans.settings import at_rate
from bench.load.report import ReportRun, ReportSearch, render_report
from bench.load.results.compare import as_text, compare_results
from bench.load.results.files import as_unicode, check_output, json_safe, write_or_rescue
from bench.load.results.result import (
    SEARCH,
    read_any,
    read_result,
    read_run,
    read_search,
    write_result,
)
from bench.load.results.summary_text import summary_lines
from bench.load.runner import Measurement
from cluster.errors import ConfigError

app = typer.Typer(
    name="bench",
    cls=PlainGroup,
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoadOptions):
    target: float = option(
        0.9, "with --strict, the share of all offered requests that must meet every SLO", MEASURING
    )

    @property
    def strict_share(self) -> float | None:
        return self.target if self.strict else None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    rates: str = option("1,2,4,8", "mean requests per second, one run each", ARRIVALS)


@app.command(cls=HintingCommand, epilog=EXIT_HELP)
@options(RunOptions)
def run(given: RunOptions) -> None:
    """Offer one load and report what came back."""
    with uninterrupted() as stop:
        plan, how = plan_settings(given), run_settings(given)
        check_outputs(given.report, requests_of=_files(given.out))
        _say_notes(given, overwritten(given.report, requests_of=_files(given.out)))
        session = Session.open(given, stop)
        measurement = session.measure(session.fit(plan), how)
        written: list[str] = []
        try:
            written += _write_run(given.out, measurement)
            written += _write_report(given.report, [measurement])
        finally:
            say([*summary_lines(measurement.result), *written])
    raise typer.Exit(exit_status([measurement.result], stop, strict_share=given.strict_share))


@app.command(cls=HintingCommand, epilog=EXIT_HELP)
@options(SweepOptions)
def sweep(given: SweepOptions) -> None:
    """The same load at several rates. OUT.json becomes OUT.rate-R.json for each rate R."""
    with uninterrupted() as stop:
        rates = parse_rates("--rates", given.rates)
        check_unvaried(given, "sweep")
        settings, how = plan_settings(given, rate=rates[0]), run_settings(given)
        outs = {rate: _of_rate(given.out, rate) for rate in rates}
        check_outputs(given.report, requests_of=[path for out in outs.values() for path in _files(out)])
        plans = [at_rate(settings, rate, settings.seed, settings.salt + i) for i, rate in enumerate(rates)]
        _say_notes(given, overwritten(given.report, *outs.values()))
        session = Session.open(given, stop)
        plans = [session.fit(plan) for plan in plans]
        session.check(plans)
        measured: list[Measurement] = []
        lost: str | None = None
        for rate, plan in zip(rates, plans, strict=True):
            measurement = session.measure(plan, how, title=f"{rate:g} req/s")
            measured.append(measurement)
            written: list[str] = []
            try:
                written += _write_run(outs[rate], measurement)
            finally:
                say([f"--- {rate:g} req/s", *summary_lines(measurement.result), *written])
            if not measurement.run.is_complete:
                break
            lost = server_lost(measurement.run)
            if lost is not None and rate != rates[-1]:
                break
        say(_write_report(given.report, measured))
        if lost is not None and len(measured) < len(rates):
            missing = ", ".join(f"{rate:g}" for rate in rates[len(measured) :])
            note(f"INCOMPLETE: the sweep ended at {rate:g} req/s, without the rates {missing}: {lost}")
    results = [one.result for one in measured]
    raise typer.Exit(exit_status(results, stop, len(rates), given.strict_share))


@app.command(name="max-goodput", cls=HintingCommand, epilog=EXIT_HELP)
@options(SearchOptions)
def max_goodput(given: SearchOptions) -> None:
    """The highest rate at which 90 % (and 99 %) of all offered requests meet every SLO.

    Bisection over rates, for several seeds. Each probe offers the load for --duration (60 s); its first sixth
    is warm-up unless --warmup or --steady says otherwise.
    """
    with uninterrupted() as stop:
        search = Search.of(given)
        check_outputs(given.out, given.report)
        _say_notes(given, overwritten(given.out, given.report))
        found, measured = search.run(Session.open(given, stop), given.label)
        found = json_safe(found)
        written: list[str] = []
        try:
            if given.out is not None:
                write_result(given.out, found)
                written += [f"written: {given.out}"]
            written += _write_report(given.report, measured, found)
        finally:
            say([*answer_lines(found), *written])
    raise typer.Exit(search_status(found, stop, given.strict))


@app.command(cls=PlainCommand, epilog=EXIT_HELP)
def report(
    results: Annotated[list[Path], typer.Argument(help="result files of `run`, `sweep` and `max-goodput`")],
    out: Annotated[Path, typer.Option(help="HTML file to write")] = Path("report.html"),
) -> None:
    """One self-contained HTML page from result files."""
    if any(os.path.realpath(path) == os.path.realpath(out) for path in results):
        raise ConfigError(f"--out {out} is one of the results: give the page a file of its own.")
    check_output(out)
    runs: list[ReportRun] = []
    searches: list[ReportSearch] = []
    for path in results:
        if read_any(path).get("kind") == SEARCH:
            found = read_search(path)
            searches.append(ReportSearch(found.get("label") or path.stem, found, file=path.stem))
            runs += [ReportRun(result, is_probe=True) for result in found["runs"]]
        else:
            runs.append(ReportRun(read_result(path), read_run(path), file=path.stem))
    say(_write_text(out, render_report(runs, searches)))


@app.command(cls=PlainCommand, epilog=EXIT_HELP)
def compare(results: Annotated[list[Path], typer.Argument(help="two or more result files")]) -> None:
    """Result files side by side, with ratios to the first where both may be judged."""
    if len(results) < 2:
        raise ConfigError("compare needs two or more result files")
    read = [read_result(path) for path in results]
    labels = [str(one.get("label") or path.stem) for one, path in zip(read, results, strict=True)]
    comparison = compare_results(read, labels)
    say([as_text(comparison).rstrip("\n")])
    raise typer.Exit(Status.DONE if comparison.is_judged else Status.NOT_JUDGED)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def mock(context: typer.Context) -> None:
    """An OpenAI-compatible server with scripted timings and faults, to test load tests against."""
    from bench.load.mock.process import main as serve_mock

    raise typer.Exit(serve_mock(context.args, "baton bench mock"))


def _say_notes(given: LoadOptions, others: Iterable[str]) -> None:
    for text in (*slo_notes(given.slo), *others):
        note(f"note: {text}")


def _files(out: Path | None) -> list[Path]:
    return [] if out is None else [out]


def _of_rate(out: Path | None, rate: float) -> Path | None:
    return None if out is None else out.parent / f"{out.stem}.rate-{rate:g}.json"


def _write_run(out: Path | None, measurement: Measurement) -> list[str]:
    """Says what was written."""
    if out is None:
        return []
    write_result(out, measurement.result, measurement.run)
    return [f"written: {out}"]


def _write_report(
    path: Path | None, measured: Iterable[Measurement], found: dict[str, Any] | None = None
) -> list[str]:
    if path is None:
        return []
    searches = [] if found is None else [ReportSearch(found["url"], found)]
    runs = [ReportRun(one.result, one.run, is_probe=found is not None) for one in measured]
    return _write_text(path, render_report(runs, searches))


def _write_text(path: Path, text: str) -> list[str]:
    page = as_unicode(text).encode()
    write_or_rescue([(path, lambda: [page])])
    return [f"written: {path}"]
