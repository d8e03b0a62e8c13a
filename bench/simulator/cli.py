"""`baton simulate`: the cluster in virtual time. A violation prints its seed; the status is 1."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.load.results.files import check_output_with_text
from bench.simulator.batch import Batch, run
from bench.simulator.results import header, of_runs, text_of_runs, write
from bench.simulator.scenario import draw
from bench.simulator.simulation import Report, Simulation
from bench.simulator.table import Totals, render

SEEDS = 20
MAX_SHOWN = 20  # violations printed in full

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    faults: Annotated[
        bool, typer.Option("--faults/--no-faults", help="inject faults at random messages and steps")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"number of runs, each with its seed (default: {SEEDS})")
    ] = None,
    first_seed: Annotated[int | None, typer.Option(min=0, help="seed of the first run (default: 0)")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="only this seed")] = None,
    requests: Annotated[int, typer.Option(min=1, help="requests per run")] = 500,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes (default: one per core)")] = None,
    trace_log: Annotated[bool, typer.Option("--trace-log", help="print every event; with --seed")] = False,
    every_moment: Annotated[
        bool, typer.Option("--every-moment", help="one fault of each kind at every event of a small run")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="write the result there as JSON, and as text beside it")
    ] = None,
) -> None:
    """Run the same routers, workers and caches as the live cluster in virtual time, and check every rule.

    The model's tokens are hashes of all that came before them, read from simulated KV: a wrong, lost, doubled
    or reordered token is always seen. Equal seeds give equal runs.

    With --trace FILE it serves a trace instead, for its goodput: see `baton simulate --trace FILE --help`.
    """
    if trace_log and seed is None:
        raise typer.BadParameter("--trace-log needs --seed: one run is enough to read")
    if seed is not None and (seeds is not None or first_seed is not None):
        raise typer.BadParameter("--seed is one run: leave --seeds and --first-seed out")
    if every_moment and not seed is seeds is first_seed is None:
        raise typer.BadParameter("--every-moment has runs of its own: leave the seeds out")
    if out is not None:
        check_output_with_text(out)
    first, count = (first_seed or 0, seeds or SEEDS) if seed is None else (seed, 1)
    batch = Batch(first, count, requests, faults, every_moment)
    num_workers = 1 if seed is not None else min(jobs or _num_cores(), count if not every_moment else 1024)
    started = time.perf_counter()
    if seed is not None and trace_log:
        reports = [Simulation(draw(seed, num_requests=requests, faults=faults), typer.echo).run()]
    else:
        reports = _shown(batch, num_workers)
    if out is not None:
        content = header(_command(batch), time.perf_counter() - started, num_workers)
        totals = _totals(reports)
        content |= {
            "first_seed": first,
            "seeds": count,
            "requests_per_seed": requests,
            **of_runs(totals),
        }
        write(out, content, text_of_runs(content, totals))
    _finish(reports, faults, requests, is_struck=every_moment)


def _num_cores() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _command(batch: Batch) -> str:
    """What makes these runs again."""
    if batch.every_moment:
        return "baton simulate --every-moment"
    first = f" --first-seed {batch.first_seed}" if batch.first_seed else ""
    faults = " --faults" if batch.faults else ""
    return f"baton simulate{faults} --seeds {batch.num_seeds}{first} --requests {batch.num_requests}"


def _totals(reports: list[Report]) -> Totals:
    totals = Totals()
    for report in sorted(reports, key=lambda report: report.seed):
        totals.add(report)
    return totals


def _shown(batch: Batch, num_workers: int) -> list[Report]:
    """All reports; a bar tells how far it is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reports: list[Report] = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None if batch.every_moment else batch.num_seeds)
        failed = 0
        for report in run(batch, num_workers):
            reports.append(report)
            failed += report.violation is not None
            progress.update(
                task, advance=1, description=f"simulating, {failed} failed" if failed else "simulating"
            )
    return reports


def _finish(reports: list[Report], faults: bool, requests: int, *, is_struck: bool) -> None:
    totals = _totals(reports)
    typer.echo(render(totals))
    typer.echo(
        f"{totals.num_runs:,} runs, {totals.num_requests:,} requests, {totals.num_events:,} events, "
        f"{totals.virtual_s:,.0f} virtual seconds."
    )
    if len(reports) == 1:
        typer.echo(f"Hash of the run: {reports[0].digest % 2**64:016x}")
    if not totals.failures:
        typer.secho("Every rule held.", fg="green")
        return
    for report in totals.failures[:MAX_SHOWN]:
        typer.secho(f"{report.label}: {report.violation}", fg="red")
        if not is_struck:
            options = f"{'--faults ' if faults else ''}--seed {report.seed} --requests {requests}"
            typer.echo(f"  again: baton simulate {options}")
    if len(totals.failures) > MAX_SHOWN:
        typer.echo(f"... and {len(totals.failures) - MAX_SHOWN} more")
    raise typer.Exit(1)
