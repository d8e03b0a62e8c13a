"""What every peer is offered: closed loops of one shape, and the search for max goodput on a trace.

Prompts are token ids, the same for every peer (one seed); each run has a salt of its own, so nothing is found
in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.figures.slo import Slo
from bench.load.figures.window import Window
from bench.load.goodput.probing import find_max_goodput
from bench.load.goodput.values import SearchSettings
from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import Oversize, PlanSettings, Synthetic, TraceReplay, at_rate
from bench.load.runner import Measurement, RunSettings, describe_environment, measure
from bench.peers.outcome import Goodput
from bench.peers.server import Running

INPUT_TOKENS, OUTPUT_TOKENS = 256, 128
WARMUP_OUTPUT_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
SAMPLE_REQUESTS = 64  # of a trace, for the mean length of its answers
GROWTH = 1.6  # of the first steps: bisected once, pass and fail are 1.26 apart
MIN_REQUESTS = 6  # per probe: fewer say nothing about a share of 90 %


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The open-loop load of the goodput search."""

    path: Path
    scale: float  # divides the trace's lengths: what a machine of this size can serve
    slos: tuple[Slo, ...]
    probe_s: float
    seeds: tuple[int, ...]
    targets: tuple[float, ...]
    max_probes: int
    tolerance: float  # the search ends when pass and fail differ by at most this share


def closed_loop_settings(
    running: Running, concurrency: int, num_requests: int, salt: int, output_tokens: int = OUTPUT_TOKENS
) -> PlanSettings:
    return PlanSettings(
        model=running.info.model,
        arrival=arrivals.closed_loop(concurrency),
        workload=Synthetic(input=parse_lengths(str(INPUT_TOKENS)), output=parse_lengths(str(output_tokens))),
        num_requests=num_requests,
        max_model_len=running.info.max_model_len,
        salt=salt,
    )


def warm_up(running: Running, concurrency: int, backend: str, salt: int) -> Measurement:
    """Short answers, several at once: what first use compiles or allocates is there afterwards."""
    settings = closed_loop_settings(running, concurrency, concurrency, salt, WARMUP_OUTPUT_TOKENS)
    return _measure(running, settings, RunSettings(timeout_s=REQUEST_TIMEOUT_S), backend)


def measure_closed_loop(
    running: Running, concurrency: int, num_requests: int, backend: str, salt: int
) -> Measurement:
    settings = closed_loop_settings(running, concurrency, num_requests, salt)
    return _measure(running, settings, RunSettings(timeout_s=REQUEST_TIMEOUT_S), backend)


def trace_settings(running: Running, load: TraceLoad, rate: float) -> PlanSettings:
    return PlanSettings(
        model=running.info.model,
        arrival=arrivals.trace_times(rate),
        workload=TraceReplay(path=str(load.path), scale=load.scale, random_offset=True),
        duration_s=load.probe_s,
        max_model_len=running.info.max_model_len,
        oversize=Oversize.CLAMP,
    )


def search_goodput(
    running: Running, load: TraceLoad, output_tok_per_s: float, backend: str, tell: Callable[[str], None]
) -> tuple[list[Goodput], dict[str, Any]]:
    """Max goodput per target share, and the search's own account.

    `output_tok_per_s` is what the server reached in a closed loop: an eighth of it is where the search
    begins, for SLOs bind long before throughput does.
    """
    base = trace_settings(running, load, rate=SAMPLE_REQUESTS / load.probe_s)
    plan = build_plan(base, None)
    mean_output = statistics.fmean(request.output_tokens or 1 for request in plan.requests)
    min_rate = MIN_REQUESTS / load.probe_s
    search = SearchSettings(
        start_rate=max(min_rate, round(output_tok_per_s / 8 / mean_output, 3)),
        min_rate=min_rate,
        targets=load.targets,
        seeds=load.seeds,
        max_probes=load.max_probes,
        tolerance=load.tolerance,
        growth=GROWTH,
    )
    how = RunSettings(
        slos=load.slos, window=Window(warmup_s=load.probe_s / 6), timeout_s=max(60.0, load.probe_s)
    )
    found, _ = find_max_goodput(
        search,
        lambda probe, number: _measure(
            running, at_rate(base, probe.rate, probe.seed, number + 1), how, backend
        ),
        lambda probe, outcome, _: tell(
            f"  {probe.rate:.3g} req/s, seed {probe.seed}: "
            f"{outcome.attainment or 0.0:.1%} of {outcome.num_offered} good"
        ),
    )
    return [
        Goodput(
            target=answer["target"],
            requests_per_s=answer["rate"],
            ci_low=answer["ci_low"],
            ci_high=answer["ci_high"],
            is_converged=answer["is_converged"],
            notes=[*answer["notes"], *found["notes"]],
        )
        for answer in found["answers"]
    ], found


def _measure(running: Running, settings: PlanSettings, how: RunSettings, backend: str) -> Measurement:
    environment = describe_environment(running.target, running.info, backend, None, 0)
    return measure(settings, how, running.target, environment, None)
