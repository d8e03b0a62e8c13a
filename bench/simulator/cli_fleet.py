"""`baton simulate --trace FILE`: a pool of workers serves a trace in virtual time, at one rate or at the
highest that keeps 90 % of all requests within the SLO. `baton plan`: which roles the workers should have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.load.client.interrupts import EXIT_INTERRUPTED
from bench.load.figures.slo import format_slos, parse_slos, slos_to_ms
from bench.load.results.files import json_safe, write_atomically
from bench.simulator.cli_fleet_checks import check_out, check_run
from bench.simulator.cli_fleet_runs import OUT_OF_REACH, search, serve
from bench.simulator.cli_screen import fail, line, warn
from bench.simulator.fleet.planner import Plan, plan_roles
from bench.simulator.fleet.policies import PolicySpec, parse_policy
from bench.simulator.fleet.search import GOAL
from bench.simulator.fleet.trial import MIN_REQUESTS, Setup, impossible, lengthened, targets_of, too_large
from bench.simulator.fleet.workload import read_rows
from bench.simulator.hardware import Hardware, calibration_files, parse_pool
from cluster.errors import BatonError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TraceOption = Annotated[
    Path, typer.Option("--trace", help="Azure or BurstGPT CSV, Mooncake or canonical JSONL")
]
FormatOption = Annotated[
    str | None, typer.Option(help="azure, mooncake, burstgpt or canonical (default: detected)")
]
WorkersOption = Annotated[int | None, typer.Option(help="number of workers; with one kind of hardware")]
HardwareOption = Annotated[
    str,
    typer.Option(
        help="KIND, or KIND:COUNT,KIND:COUNT; a kind is a name, a calibration's JSON or operators' CSV file"
    ),
]
SloOption = Annotated[str, typer.Option(help="targets, such as ttft=0.5s,tpot=25ms (and gap=100ms)")]
OutOption = Annotated[Path | None, typer.Option(help="write the result as JSON")]


@app.command()
def simulate(
    trace: TraceOption,
    slo: SloOption,
    hardware: HardwareOption = "h100-llama3-8b",
    workers: WorkersOption = None,
    policy: Annotated[
        str, typer.Option(help="elastic, colocated:CHUNK[:srf][:rr], static:XpYd[:srf][:rr][:CHUNK]")
    ] = "elastic",
    rate: Annotated[float | None, typer.Option(help="requests per second, for one run per seed")] = None,
    max_goodput: Annotated[
        bool, typer.Option("--max-goodput", help=f"find the highest rate with {GOAL:.0%} within the SLO")
    ] = False,
    seeds: Annotated[int, typer.Option(help="number of runs or searches, each with its seed")] = 3,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    duration: Annotated[
        float | None,
        typer.Option(
            help="seconds of arrivals (default: ten lives of a request, 40 to 240); "
            f"as long as {MIN_REQUESTS:,} requests take, if that is longer"
        ),
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, or trace: its own rhythm at that rate")] = "poisson",
    prefix_cache: Annotated[
        bool, typer.Option(help="reuse KV of equal prefixes (traces with hash_ids)")
    ] = True,
    trace_format: FormatOption = None,
    out: OutOption = None,
) -> None:
    """Serve a trace in virtual time and hold every request against the SLO."""
    _told(
        lambda: _simulate(
            _Given(trace, slo, hardware, workers, trace_format, out),
            policy,
            rate,
            max_goodput,
            first_seed,
            seeds,
            duration,
            arrivals,
            prefix_cache,
        )
    )


@plan_app.command()
def plan(
    trace: TraceOption,
    slo: SloOption,
    hardware: HardwareOption = "h100-llama3-8b",
    workers: WorkersOption = None,
    trace_format: FormatOption = None,
    out: OutOption = None,
) -> None:
    """Say which workers should prefill, decode or do both for a trace and SLO, and what that would serve."""
    _told(lambda: _plan(_Given(trace, slo, hardware, workers, trace_format, out)))


class _Given(msgspec.Struct, frozen=True):
    """Options of both commands."""

    trace: Path
    slo: str
    hardware: str
    workers: int | None
    trace_format: str | None
    out: Path | None


def _told(command: Any) -> None:
    try:
        command()
    except BatonError as error:
        fail(error)
        raise typer.Exit(2) from None


def _simulate(
    given: _Given,
    policy: str,
    rate: float | None,
    is_search: bool,
    first_seed: int,
    num_seeds: int,
    duration_s: float | None,
    arrivals: str,
    prefix_cache: bool,
) -> None:
    check_run(rate, is_search, num_seeds, duration_s, arrivals)
    pool = parse_pool(given.hardware, given.workers)
    slos = parse_slos(given.slo)
    targets_of(slos)
    spec = parse_policy(policy, len(pool))
    check_out(given.out, [given.trace, *calibration_files(given.hardware)])
    trace, warnings = read_rows(given.trace, given.trace_format, arrivals == "trace")
    setup = Setup(trace.rows, pool, spec, slos, duration_s, arrivals == "trace", prefix_cache)
    warnings += impossible(setup) + too_large(setup)
    if rate is not None and not is_search:
        warnings += lengthened(setup, [rate])
    _warned(warnings)
    seeds = range(first_seed, first_seed + num_seeds)
    result: dict[str, Any] = {
        "kind": "simulated-max-goodput" if is_search else "simulated-run",
        "policy": policy,
        "hardware": given.hardware,
        "num_workers": len(pool),
        "trace": {
            "path": trace.path,
            "sha256": trace.sha256,
            "format": trace.format,
            "rows": len(trace.rows),
        },
        "slo": format_slos(slos),
        "slos_ms": slos_to_ms(slos),
        "goal": GOAL,
        "offered_s": setup.offered_s,
        "arrivals": arrivals,
        "prefix_cache": prefix_cache,
        "seeds": list(seeds),
        "warnings": warnings,
    }
    if is_search:
        summary = search(setup, seeds, rate)
    else:
        assert rate is not None
        summary = serve(setup, rate, seeds)
    if summary.content is not None:
        result |= summary.content
        result["is_complete"] = summary.is_complete
        result["warnings"] += result.pop("notes", [])
        if given.out is not None:
            _write(given.out, result)
    if not summary.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def _warned(warnings: list[str]) -> list[str]:
    for warning in warnings:
        warn(warning)
    return warnings


def _plan(given: _Given) -> None:
    pool = parse_pool(given.hardware, given.workers)
    slos = parse_slos(given.slo)
    targets = targets_of(slos)
    check_out(given.out, [given.trace, *calibration_files(given.hardware)])
    trace, warnings = read_rows(given.trace, given.trace_format)
    setup = Setup(trace.rows, pool, PolicySpec("elastic", None), slos)
    warnings += impossible(setup) + too_large(setup)
    _warned(warnings)
    found = plan_roles(pool, [(row.input_tokens, row.output_tokens) for row in trace.rows], targets)
    for text in _plan_lines(found, pool):
        line(text)
    if found.predicted_rate <= 0:
        warnings += _warned([OUT_OF_REACH])
    if given.out is not None:
        _write(
            given.out,
            msgspec.to_builtins(found)
            | {"slo": format_slos(slos), "hardware": given.hardware, "warnings": warnings},
        )


def _plan_lines(found: Plan, pool: list[Hardware]) -> list[str]:
    lines = [f"{'kind':<18}{'workers':>8}{'prefill only':>14}{'decode only':>13}{'both':>6}"]
    for name, roles in found.roles.items():
        total = sum(roles.values())
        lines.append(f"{name:<18}{total:>8}{roles['prefill']:>14}{roles['decode']:>13}{roles['both']:>6}")
    lines.append(
        f"Predicted: {found.predicted_rate:.4g} req/s within the SLO, "
        f"{found.predicted_rate / len(pool):.3g} per accelerator; "
        f"all workers doing both: {found.rate_if_both:.4g}."
    )
    if found.level_split_gain > 0:
        lines.append(
            f"The best split would serve {found.level_split_gain:.2%} more: level, so no split is advised."
        )
    return lines


def _write(path: Path, result: dict[str, Any]) -> None:
    write_atomically(path, [json.dumps(json_safe(result), indent=1).encode(), b"\n"])
    line(f"Written: {path}")
