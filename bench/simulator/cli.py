"""`baton simulate`: the cluster in virtual time. A violation prints its seed; the status is 1."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.simulator.batch import Batch, run
from bench.simulator.scenario import draw
from bench.simulator.simulation import Report, Simulation
from bench.simulator.table import Totals, render

MAX_SHOWN = 20  # violations printed in full

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    faults: Annotated[
        bool, typer.Option("--faults/--no-faults", help="inject faults at random messages and steps")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="number of runs, each with its seed")] = 20,
    first_seed: Annotated[int, typer.Option(min=0, help="seed of the first run")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="only this seed")] = None,
    requests: Annotated[int, typer.Option(min=1, help="requests per run")] = 500,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes (default: one per core)")] = None,
    trace_log: Annotated[bool, typer.Option("--trace-log", help="print every event; with --seed")] = False,
    every_moment: Annotated[
        bool, typer.Option("--every-moment", help="one fault of each kind at every event of a small run")
    ] = False,
) -> None:
    """Run the same routers, workers and caches as the live cluster in virtual time, and check every rule.

    The model's tokens are hashes of all that came before them, read from simulated KV: a wrong, lost, doubled
    or reordered token is always seen. Equal seeds give equal runs.

    With --trace FILE it serves a trace instead, for its goodput: see `baton simulate --trace FILE --help`.
    """
    if trace_log and seed is None:
        raise typer.BadParameter("--trace-log needs --seed: one run is enough to read")
    if seed is not None and trace_log:
        scenario = draw(seed, num_requests=requests, faults=faults)
        _finish([Simulation(scenario, typer.echo).run()], faults, requests, is_struck=False)
        return
    first, count = (first_seed, seeds) if seed is None else (seed, 1)
    batch = Batch(first, count, requests, faults, every_moment)
    num_workers = (
        1 if seed is not None else min(jobs or os.cpu_count() or 1, count if not every_moment else 1024)
    )
    _finish(_shown(batch, num_workers), faults, requests, is_struck=every_moment)


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
    totals = Totals()
    for report in reports:
        totals.add(report)
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
