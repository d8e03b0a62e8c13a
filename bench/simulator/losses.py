"""Where elastic loses: `python -m bench.simulator.losses --trace NAME=FILE ... [--num 100] [--keep-fixed]`.

1. `cells` draws pools (kinds, sizes, prices of mixed steps), traces (as they are, or with other lengths) and
   SLOs from all combinations, the same ones for the same number.
2. `measure` searches elastic in its one configuration and the best of a handful of fixed policies.
3. The table lists all cells, the worst first.

The fixed policies do not change with elastic: `--keep-fixed` takes theirs from the output that is there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec

from bench.load.figures.slo import parse_slos
from bench.load.plans.trace_formats import TraceRow
from bench.load.plans.traces import read_trace
from bench.load.results.files import json_safe, write_atomically
from bench.simulator.fleet.policies import PolicySpec, parse_policy
from bench.simulator.fleet.search import find_best, max_goodput, rates, start_rate
from bench.simulator.fleet.trial import Setup, impossible
from bench.simulator.hardware import Hardware, parse_pool

H100, H20, OPT = "h100-llama3-8b", "h20-llama3-8b", "distserve-opt13b"
LLAMA_POOLS: Final = (
    f"{H100}:2",
    f"{H100}:4",
    f"{H100}:8",
    f"{H100}:16",
    f"{H100}:4,{H20}:4",
    f"{H100}:2,{H20}:6",
    f"{H20}:6,{H100}:2",
)
OPT_POOLS: Final = (f"{OPT}-tp1:4", f"{OPT}-tp2:4", f"{OPT}-tp2:2,{OPT}-tp1:4", f"{OPT}-tp1-fused:8")
PRICES_MS: Final = (0.0, 1.0, 2.0, 5.0, 10.0)
LLAMA_SLOS: Final = (
    "ttft=0.2s,tpot=10ms",
    "ttft=0.2s,tpot=25ms",
    "ttft=0.5s,tpot=8ms",
    "ttft=0.5s,tpot=15ms",
    "ttft=0.5s,tpot=25ms",
    "ttft=0.5s,tpot=25ms,gap=30ms",
    "ttft=1s,tpot=50ms,gap=100ms",
    "ttft=2s,tpot=12ms",
    "ttft=2s,tpot=40ms",
    "ttft=5s,tpot=25ms",
    "ttft=5s,tpot=100ms",
)
OPT_SLOS: Final = ("ttft=0.5s,tpot=60ms", "ttft=1s,tpot=100ms", "ttft=0.3s,tpot=40ms", "ttft=4s,tpot=150ms")
SHAPES: Final = ((1.0, 1.0), (0.25, 1.0), (1.0, 4.0), (1.0, 0.25))  # of prompts and of answers: times as long
OPT_SHAPES: Final = ((0.25, 1.0), (0.5, 0.5))

MOST_REQUESTS: Final = 8_000  # of a run; cells that need more are left out
_NEXT_TO_NOTHING: Final = 0.02  # requests per second: about the least that a search tries


@dataclass(frozen=True, slots=True)
class Cell:
    pool: str
    price_ms: float
    trace: str
    shape: tuple[float, float]
    slo: str

    @property
    def name(self) -> str:
        price = f" +{self.price_ms:g}ms" if self.price_ms else ""
        shape = "" if self.shape == (1.0, 1.0) else " x{:g}/x{:g}".format(*self.shape)
        return f"{self.pool}{price} {self.trace}{shape} {self.slo}"


def cells(traces: Sequence[str], num: int) -> list[Cell]:
    """So many, drawn from all combinations; each was equally likely."""
    combinations = [
        *product(LLAMA_POOLS, PRICES_MS, traces, SHAPES, LLAMA_SLOS),
        *product(OPT_POOLS, (0.0,), traces, OPT_SHAPES, OPT_SLOS),
    ]
    random.Random(0).shuffle(combinations)
    return [Cell(*one) for one in combinations[:num]]


def fixed_policies(num_workers: int) -> list[PolicySpec]:
    """Likely ones first. Shortest prompts first: what serves most, nearly always."""
    splits = sorted({max(1, round(num_workers * share)) for share in (0.25, 0.375, 0.5, 0.625, 0.75)})
    splits = sorted((p for p in splits if p < num_workers), key=lambda p: abs(p - num_workers / 2))
    texts = [f"colocated:{chunk}:srf" for chunk in (512, 256, 1024, 2048)]
    texts += [f"static:{p}p{num_workers - p}d:srf" for p in splits]
    texts += ["colocated:512:fcfs", f"static:{splits[0]}p{num_workers - splits[0]}d:fcfs"]
    return [parse_policy(text, num_workers) for text in texts]


def pool_of(cell: Cell) -> list[Hardware]:
    """One object per kind, as `parse_pool` gives: policies compare kinds by identity."""
    pool = parse_pool(cell.pool, None)
    if not cell.price_ms:
        return pool
    dear = {
        one.name: replace(one, model=msgspec.structs.replace(one.model, mixed_s=cell.price_ms * 1e-3))
        for one in pool
    }
    return [dear[one.name] for one in pool]


@cache
def _rows(path: Path) -> tuple[TraceRow, ...]:
    return read_trace(path).rows


def setup_of(cell: Cell, paths: Mapping[str, Path], length_s: float | None) -> Setup:
    prompt, answer = cell.shape
    rows = _rows(paths[cell.trace])
    if cell.shape != (1.0, 1.0):
        rows = tuple(
            replace(
                row,
                input_tokens=max(1, round(row.input_tokens * prompt)),
                output_tokens=max(1, round(row.output_tokens * answer)),
                hash_ids=row.hash_ids if prompt == 1.0 else None,
            )
            for row in rows
        )
    pool = pool_of(cell)
    return Setup(rows, pool, parse_policy("elastic", len(pool)), parse_slos(cell.slo), length_s)


def measure(
    cell: Cell,
    paths: Mapping[str, Path],
    num_seeds: int,
    length_s: float | None,
    known: Mapping[str, dict[str, Any]],
) -> dict[str, Any] | None:
    """`known`: earlier results by cell, whose fixed policies are kept. None: nobody can meet the targets, or
    it would take minutes."""
    setup = setup_of(cell, paths, length_s)
    if impossible(setup) or setup.num_requests(start_rate(setup)) > MOST_REQUESTS:
        return None
    seeds = tuple(range(num_seeds))
    elastic = rates(max_goodput(setup, seeds)[0])
    if cell.name in known:
        fixed = known[cell.name]["fixed"]
    else:
        policy, rate = find_best(setup, fixed_policies(len(setup.pool)), 0)
        per_seed = rates(max_goodput(replace(setup, policy=policy), seeds, rate or None)[0])
        fixed = {"policy": policy.text, "rate": fmean(per_seed), "per_seed": per_seed}
    rate = fmean(elastic)
    if max(rate, fixed["rate"]) < _NEXT_TO_NOTHING:
        return None
    return {
        "cell": cell.name,
        **asdict(cell),
        "elastic": {"rate": rate, "per_seed": elastic},
        "fixed": fixed,
        "over_best": rate / max(fixed["rate"], 1e-9),
    }


def text_table(results: Sequence[dict[str, Any]]) -> str:
    ordered = sorted(results, key=lambda one: one["over_best"])
    width = max(len(one["cell"]) for one in ordered) + 2
    lines = [f"{'cell':<{width}}{'best fixed policy':>34}{'elastic':>9}{'/best':>7}"]
    for one in ordered:
        fixed = f"{one['fixed']['rate']:.4g} ({one['fixed']['policy']})"
        lines.append(
            f"{one['cell']:<{width}}{fixed:>34}{one['elastic']['rate']:>9.4g}{one['over_best']:>7.2f}"
        )
    ratios = [one["over_best"] for one in ordered]
    lost = sum(ratio < 1 for ratio in ratios)
    lines.append(
        f"{len(ratios)} cells: median {median(ratios):.2f}, least {ratios[0]:.2f}; elastic loses in {lost}."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--num", type=int, default=100, help="cells drawn")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--length", type=float, help="seconds of arrivals (default: as `baton simulate`)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep cells that the output already has")
    parser.add_argument(
        "--keep-fixed", action="store_true", help="only elastic again, of the cells in the output"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated-losses.json"))
    given = parser.parse_args()
    paths = {name: Path(path) for name, _, path in (text.partition("=") for text in given.trace)}
    kept: dict[str, dict[str, Any]] = {}
    how = {"seeds": given.seeds, "length_s": given.length}
    if given.out.exists():
        there = json.loads(given.out.read_text())
        if {key: there.get(key) for key in how} != how:
            parser.error(
                f"{given.out} was made with other --seeds or --length: give the same, or another --out"
            )
        kept = {one["cell"]: one for one in there["cells"]}
    wanted = [cell for cell in cells(tuple(paths), given.num) if given.only in cell.name]
    if given.keep_fixed:
        wanted = [cell for cell in wanted if cell.name in kept]
    elif given.resume:
        wanted = [cell for cell in wanted if cell.name not in kept]
    known = kept if given.keep_fixed else {}
    work = partial(measure, paths=paths, num_seeds=given.seeds, length_s=given.length, known=known)
    with ProcessPoolExecutor(given.jobs) as pool:
        for result in pool.map(work, wanted):
            if result is None:
                continue
            kept[result["cell"]] = result
            sys.stderr.write(f"{result['over_best']:.2f} {result['cell']}\n")
            content = {**how, "cells": list(kept.values())}
            write_atomically(given.out, [json.dumps(json_safe(content), indent=1).encode(), b"\n"])
    if not kept:
        parser.error("nobody meets the targets in any of these cells: draw more (--num)")
    length = "" if given.length is None else f" --length {given.length:g}"
    head = (
        f"python -m bench.simulator.losses {' '.join(f'--trace {name}=FILE' for name in paths)} "
        f"--num {given.num} --seeds {given.seeds}{length}\n"
        f"Requests per second with 90 % in the SLO, {given.seeds} seeds. xA/xB: prompts A and answers B\n"
        "times as long; +Nms: a mixed step takes that much more than its parts. Cells whose targets nobody\n"
        "meets are left out.\n\n"
    )
    table = text_table(list(kept.values()))
    write_atomically(given.out.with_suffix(".txt"), [(head + table).encode()])
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
