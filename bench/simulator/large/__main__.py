"""How fast a large fleet is simulated: `python -m bench.simulator.large [--workers 10000] [--rate 5000]`.

An hour (`--seconds 3600`) of requests is served by a fleet divided into cells (`router.cells`), each cell by
the live system's placement and scheduling; see `bench.simulator.large.shard` for what is simplified. Printed,
and written with `--out`: requests simulated per second, microseconds each, memory, what the SLO would say,
and how long the whole hour takes if a part of it was run: by the second half of the part, since batches and
caches fill up in the first.

Exit code 1: the hour takes more than `--limit-minutes`, or all processes together more than `--limit-gib`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.arguments import natural, positive
from bench.load.results.files import check_output, json_safe, write_atomically
from bench.simulator.large.plan import Plan
from bench.simulator.large.processes import Progress, Report, run
from bench.simulator.large.quantiles import ERROR
from bench.simulator.large.tally import distributions, total
from bench.simulator.results import header
from cluster.errors import BatonError, ConfigError
from router.cells import CellSettings

HOUR_S = 3600.0


def result_of(plan: Plan, reports: Sequence[Report]) -> dict[str, Any]:
    """Figures of a run, as its file has them. Rates are per wall second but for goodput."""
    counts, figures = total(report.tallied for report in reports)
    wall_s = max(report.wall_s for report in reports)
    offered, (from_s, until_s) = max(1, counts.num_offered), plan.measured_s
    return {
        "plan": msgspec.to_builtins(plan),
        "num_cells": plan.num_cells,
        "requests": counts.num_arrived,
        "simulated_per_s": counts.num_arrived / wall_s,
        "wall_us_per_request": wall_s / max(1, counts.num_arrived) * 1e6,
        "cpu_us_per_request": sum(one.cpu_s for one in reports) / max(1, counts.num_arrived) * 1e6,
        "wall_s": wall_s,
        "hour_s": max(hour_s(report, plan.seconds) for report in reports),
        "peak_rss_bytes": sum(report.peak_rss_bytes for report in reports),
        "goodput": counts.num_good / (until_s - from_s),
        "attainment": counts.num_good / offered,
        "attainment_by_metric": {
            "ttft": counts.num_in_ttft / offered,
            "tpot": counts.num_in_tpot / offered,
            "gap": counts.num_in_gap / offered,
        },
        "counts": msgspec.to_builtins(counts),
        "distributions": distributions(figures),
        "quantile_error": ERROR,
        "busy": sum(one.busy_s for one in reports) / (plan.workers * plan.seconds),
        **{
            name: sum(getattr(one, name) for one in reports)
            for name in (
                "num_steps",
                "num_preemptions",
                "num_local",
                "num_moved",
                "cached_tokens",
                "transferred_bytes",
            )
        },
    }


def hour_s(report: Report, seconds: float) -> float:
    """Wall seconds of an hour of arrivals, at the pace of the second half of what was run."""
    if seconds >= HOUR_S or len(report.marks) < 2:
        return report.wall_s * HOUR_S / seconds
    end_s, end_wall_s = report.marks[-1]
    middle_s, middle_wall_s = min(report.marks[:-1], key=lambda mark: abs(mark[0] - seconds / 2))
    return (end_wall_s - middle_wall_s) / (end_s - middle_s) * HOUR_S


def text_of(result: dict[str, Any]) -> str:
    """A few lines for people."""
    plan = result["plan"]
    lines = [
        f"{plan['workers']:,} workers ({plan['hardware']}) in {result['num_cells']} cells, "
        f"{plan['rate']:,.0f} req/s for {plan['seconds']:,.0f} s: {result['requests']:,} requests, "
        f"{result['num_steps']:,} steps, workers busy {result['busy']:.0%} of the time",
        f"{result['simulated_per_s']:,.0f} requests/s simulated by {result['processes']} processes: "
        f"{result['wall_us_per_request']:.1f} us each ({result['cpu_us_per_request']:.1f} us of CPU), "
        f"{result['wall_s']:,.1f} s in all; an hour takes {result['hour_s'] / 60:.1f} minutes",
        f"{result['peak_rss_bytes'] / 2**30:.2f} GiB of memory, all processes at their peaks",
        f"{result['attainment']:.2%} within {plan['slo']}: {result['goodput']:,.0f} good req/s",
    ]
    for name, row in result["distributions"].items():
        if row["num"]:
            shown = "  ".join(f"{at} {row[f'{at}_s'] * 1e3:,.1f}" for at in ("p50", "p90", "p99", "max"))
            lines.append(f"  {name:<5} {shown}  ms")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=positive, default=10_000)
    parser.add_argument("--hardware", default="h100-llama3-8b", help="as `baton simulate` takes it")
    parser.add_argument("--rate", type=float, default=5_000.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=HOUR_S, help="virtual seconds of arrivals")
    parser.add_argument("--trace", type=Path, help="whose rows are served (default: made ones)")
    parser.add_argument("--slo", default="ttft=0.5s,tpot=25ms")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--cell-workers", type=positive, default=CellSettings().workers)
    parser.add_argument("--window-s", type=float, default=0.2, help="how often cells say how loaded they are")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--processes", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-minutes", type=float, default=30.0)
    parser.add_argument("--limit-gib", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    try:
        return _measured(given, sys.argv[1:] if arguments is None else arguments)
    except BatonError as error:
        print(error, file=sys.stderr)
        return 2


def _measured(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    for name, most in (("rate", 1e7), ("seconds", 1e6), ("window_s", 60.0)):
        if not 0 < getattr(given, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')}: give a number above 0, up to {most:g}")
    plan = Plan(
        workers=given.workers,
        hardware=given.hardware,
        rate=given.rate,
        seconds=given.seconds,
        slo=given.slo,
        seed=given.seed,
        cell_workers=given.cell_workers,
        window_s=given.window_s,
        prefix_cache=not given.no_prefix_cache,
        trace=None if given.trace is None else str(given.trace),
    )
    plan.targets(), plan.pool()
    if given.out is not None:
        check_output(given.out)
    num_processes = min(given.processes, plan.num_cells)
    started = time.perf_counter()
    reports = run(plan, num_processes, _shown)
    command = shlex.join(["python", "-m", "bench.simulator.large", *arguments])
    result = header(command, time.perf_counter() - started, num_processes) | result_of(plan, reports)
    print(text_of(result))
    if given.out is not None:
        write_atomically(given.out, [json.dumps(json_safe(result), indent=1).encode(), b"\n"])
    is_within = result["hour_s"] <= given.limit_minutes * 60
    return int(not is_within or result["peak_rss_bytes"] > given.limit_gib * 2**30)


def _shown(progress: Progress) -> None:
    if sys.stderr.isatty() and progress.process == 0:
        print(f"\r{progress.virtual_s:,.0f} s after {progress.wall_s:,.0f} s", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
