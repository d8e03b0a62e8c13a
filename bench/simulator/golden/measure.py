"""The figures of one case: DistServe's way of finding a rate over seeds, and our steady search."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.search import max_goodput, rates
from bench.simulator.fleet.trial import Setup
from bench.simulator.golden.cases import SLOS, TARGETS, Case, Pool
from bench.simulator.golden.protocol import MOST_PER_GPU, NUM_REQUESTS, WIDTH, rate_per_gpu

FINE_WIDTH = 0.02
GRID = MOST_PER_GPU / 2**5  # DistServe's answers are multiples of this: five halvings make `WIDTH`


def measure(case: Case, rows: Sequence[TraceRow], num_seeds: int, num_steady: int) -> dict[str, Any]:
    """Requests per second and GPU. A search with `FINE_WIDTH` begins with the probes of one with `WIDTH`, so
    what DistServe would have printed is its answer on the grid."""
    fine = [
        rate_per_gpu(case.serve, rows, case.num_gpus, TARGETS, seed, FINE_WIDTH) for seed in range(num_seeds)
    ]
    printed = [rate // GRID * GRID for rate in fine]
    result: dict[str, Any] = {
        "case": case.name,
        "num_gpus": case.num_gpus,
        "num_requests": NUM_REQUESTS,
        "width": WIDTH,
        "printed_per_seed": printed,
        "printed_median": median(printed),
        "fine_per_seed": fine,
        "fine_median": median(fine),
    }
    if isinstance(case, Pool) and num_steady:
        result |= _steady(case, rows, num_steady)
    return result


def _steady(case: Pool, rows: Sequence[TraceRow], num_seeds: int) -> dict[str, Any]:
    longer = [TraceRow(row.time_s, row.input_tokens, row.output_tokens + 1) for row in rows]
    setup = Setup(longer, case.workers, case.spec, SLOS, use_prefix_cache=False)
    found, _ = max_goodput(setup, tuple(range(num_seeds)), start=1.5 * case.num_gpus)
    per_seed = [rate / case.num_gpus for rate in rates(found)]
    return {"policy": case.policy, "steady_per_seed": per_seed, "steady_mean": fmean(per_seed)}


def text_line(result: dict[str, Any]) -> str:
    fine = sorted(result["fine_per_seed"])
    steady = f"{result['steady_mean']:.2f}" if "steady_mean" in result else "-"
    return (
        f"{result['case']:<52}{result['num_gpus']:>5}{result['printed_median']:>10.2f}"
        f"{result['fine_median']:>9.2f}{f'{fine[0]:.2f} to {fine[-1]:.2f}':>15}{steady:>9}"
    )


HEADER = f"{'':<52}{'GPUs':>5}{'printed':>10}{'finer':>9}{'seeds':>15}{'steady':>9}"
