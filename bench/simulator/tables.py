"""The goodput tables: `python -m bench.simulator.tables --azure FILE --mooncake FILE [--only TEXT]`.

For each row: the best colocated policy over all chunks and both orders, the best static split over all splits
and both orders (each chosen at the first seed, then searched at every seed), and elastic in its one
configuration. Rows are independent, and each is saved as it ends: a broken run goes on with `--resume`. With
`--keep-fixed` elastic alone is searched again, in a fifth of the time: the others do not change with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.load.figures.slo import parse_slos
from bench.load.plans.traces import read_trace
from bench.load.results.files import json_safe, write_atomically
from bench.simulator.fleet.policies import PolicySpec, parse_policy
from bench.simulator.fleet.scenarios import ROWS, SHIFT, Row, colocated, shifting_rows, static
from bench.simulator.fleet.search import find_best, max_goodput, rates
from bench.simulator.fleet.trial import Setup
from bench.simulator.hardware import parse_pool


def setup_of(row: Row, azure: Path, mooncake: Path) -> Setup:
    pool = parse_pool(row.pool, None)
    rows = read_trace(mooncake if row.trace == "mooncake" else azure).rows
    length_s = None
    if row.trace == SHIFT:
        rows, length_s = tuple(shifting_rows(rows)), 60.0
    return Setup(rows, pool, parse_policy("elastic", len(pool)), parse_slos(row.slo), length_s)


def measure(
    row: Row, azure: Path, mooncake: Path, num_seeds: int, known: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """`known`: results of the fixed policies, by row; the others are searched."""
    started = time.perf_counter()
    setup = setup_of(row, azure, mooncake)
    seeds = tuple(range(num_seeds))
    count = len(setup.pool)
    elastic = _searched(setup, parse_policy("elastic", count), seeds, None)
    fixed = known.get(row.name)
    best_colocated = fixed["colocated"] if fixed else _best(setup, colocated(count), seeds)
    best_static = fixed["static"] if fixed else _best(setup, static(count), seeds)
    best = max(best_colocated["rate"], best_static["rate"])
    return {
        "row": row.name,
        "pool": row.pool,
        "trace": row.trace,
        "slo": row.slo,
        "colocated": best_colocated,
        "static": best_static,
        "elastic": elastic,
        "over_colocated": elastic["rate"] / max(best_colocated["rate"], 1e-9),
        "over_static": elastic["rate"] / max(best_static["rate"], 1e-9),
        "over_best": elastic["rate"] / max(best, 1e-9),
        "wall_s": time.perf_counter() - started,
    }


def _best(setup: Setup, policies: list[PolicySpec], seeds: tuple[int, ...]) -> dict[str, Any]:
    policy, rate = find_best(setup, policies, seeds[0])
    return _searched(setup, policy, seeds, rate or None)


def _searched(
    setup: Setup, policy: PolicySpec, seeds: tuple[int, ...], start: float | None
) -> dict[str, Any]:
    found, _ = max_goodput(replace(setup, policy=policy), seeds, start)
    per_seed = rates(found)
    return {"policy": policy.text, "rate": fmean(per_seed), "per_seed": per_seed}


def text_table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'row':<34}{'best colocated':>30}{'best static':>28}{'elastic':>9}"
        f"{'/coloc':>8}{'/static':>8}{'/best':>7}"
    ]
    for one in results:
        fixed = [f"{one[name]['rate']:.4g} ({one[name]['policy']})" for name in ("colocated", "static")]
        lines.append(
            f"{one['row']:<34}{fixed[0]:>30}{fixed[1]:>28}{one['elastic']['rate']:>9.4g}"
            f"{one['over_colocated']:>8.2f}{one['over_static']:>8.2f}{one['over_best']:>7.2f}"
        )
    uniform = [one["over_best"] for one in results if one["row"].startswith("uniform")]
    if uniform:
        lines.append(f"Uniform pool, median over the best fixed policy: {median(uniform):.2f}")
    lost = [one["row"] for one in results if one["over_best"] < 1]
    lines.append(f"Elastic loses: {', '.join(lost) if lost else 'nowhere'}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--azure", type=Path, required=True)
    parser.add_argument("--mooncake", type=Path, required=True)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep rows that the output already has")
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated-goodput.json"))
    parser.add_argument("--keep-fixed", action="store_true", help="of the output; only elastic again")
    given = parser.parse_args()
    kept: dict[str, dict[str, Any]] = {}
    if (given.resume or given.keep_fixed) and given.out.exists():
        kept = {one["row"]: one for one in json.loads(given.out.read_text())["rows"]}
    known, done = (kept, {}) if given.keep_fixed else ({}, kept)
    wanted = [row for row in ROWS if given.only in row.name and row.name not in done]
    work = partial(measure, azure=given.azure, mooncake=given.mooncake, num_seeds=given.seeds, known=known)
    with ProcessPoolExecutor(given.jobs) as pool:
        for result in pool.map(work, wanted):
            done[result["row"]] = result
            found = {**kept, **done}
            ordered = [found[row.name] for row in ROWS if row.name in found]
            command = "python -m bench.simulator.tables --azure FILE --mooncake FILE"
            content = {"command": command, "seeds": given.seeds, "rows": ordered}
            write_atomically(given.out, [json.dumps(json_safe(content), indent=1).encode(), b"\n"])
            head = f"{command}\nRequests per second with 90 % in the SLO, mean of {given.seeds} seeds\n\n"
            write_atomically(given.out.with_suffix(".txt"), [(head + text_table(ordered)).encode()])
            sys.stderr.write(f"{result['row']}: {result['wall_s']:.0f} s\n")
    found = {**kept, **done}
    sys.stdout.write(text_table([found[row.name] for row in ROWS if row.name in found]))


if __name__ == "__main__":
    main()
