"""What every peer is offered: closed loops of one shape, and the search for max goodput on a trace.

Prompts are token ids, the same for every peer (one seed); each run has a salt of its own, so nothing is found
in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.load.client.target import why_gone
from bench.load.figures.slo import Slo
from bench.load.figures.window import Window
from bench.load.goodput.probing import find_max_goodput
from bench.load.goodput.values import End, SearchSettings, TargetAnswer
from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import Oversize, PlanSettings, Synthetic, TraceReplay, at_rate
from bench.load.plans.traces import read_trace
from bench.load.runner import Measurement, RunSettings, describe_environment, measure
from bench.peers.estimate import capacity_estimate, start_rate
from bench.peers.outcome import Goodput, Mean
from bench.peers.server import Running

INPUT_TOKENS, OUTPUT_TOKENS = 256, 128
WARMUP_OUTPUT_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
SAMPLE_REQUESTS = 64  # of a trace, for the mean length of its answers
GROWTH = 2.0  # of the first steps: bisected three times, pass and fail are 1.09 apart
MAX_RATE = 1000.0
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
    max_probes: int  # per server, if the time allows so many
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
    running: Running,
    load: TraceLoad,
    means: Sequence[Mean],
    max_probes: int,
    backend: str,
    tell: Callable[[str], None],
) -> tuple[list[Goodput], dict[str, Any], bool]:
    """Max goodput per target share, the search's own account, and whether the user interrupted it.
    `means`: the server's closed loops.
    """
    base = trace_settings(running, load, rate=SAMPLE_REQUESTS / load.probe_s)
    plan = build_plan(base, None)
    capacity = capacity_estimate(
        means,
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        statistics.fmean(request.input_tokens or 1 for request in plan.requests),
        statistics.fmean(request.output_tokens or 1 for request in plan.requests),
    )
    most_rows = len(read_trace(load.path).rows)
    search = search_settings(load, capacity, max_probes, min(MAX_RATE, (most_rows - 1) / load.probe_s))
    how = RunSettings(
        slos=load.slos, window=Window(warmup_s=load.probe_s / 6), timeout_s=max(60.0, load.probe_s)
    )
    found, measured = find_max_goodput(
        search,
        lambda probe, number: _measure(
            running, at_rate(base, probe.rate, probe.seed, number + 1), how, backend
        ),
        lambda probe, outcome, _: tell(
            f"  {probe.rate:.3g} req/s, seed {probe.seed}: "
            f"{outcome.attainment or 0.0:.1%} of {outcome.num_offered} good"
        ),
        lambda: why_gone(running.target),
    )
    answers = msgspec.convert(found["answers"], list[TargetAnswer])
    is_interrupted = any(not one.run.is_complete for one in measured)
    return [goodput_of(answer, found["notes"]) for answer in answers], found, is_interrupted


def search_settings(
    load: TraceLoad, capacity: float | None, max_probes: int, max_rate: float = MAX_RATE
) -> SearchSettings:
    """Seed by seed: a search whose time is over has an answer for each target from the seeds it finished.
    `max_rate`: at most what the trace has rows for.

    Raises:
        ConfigError: the trace is too short for any rate.
    """
    min_rate = MIN_REQUESTS / load.probe_s
    return SearchSettings(
        start_rate=start_rate(capacity, min_rate, max_rate),
        min_rate=min_rate,
        max_rate=max_rate,
        targets=load.targets,
        seeds=load.seeds,
        max_probes=max_probes,
        tolerance=load.tolerance,
        growth=GROWTH,
        seed_by_seed=True,
    )


def goodput_of(answer: TargetAnswer, notes: Sequence[str]) -> Goodput:
    """The mean over the seeds that were searched to their end. Seeds that were not are left out of it, and
    told; only if none was, the highest rates that had passed stand in, as a lower bound.
    """
    done = [one for one in answer.seeds if one.end in (End.FOUND, End.NOTHING_PASSED)]
    left_out = [str(one.seed) for one in answer.seeds if one not in done]
    if not done:
        return Goodput(
            target=answer.target,
            requests_per_s=answer.rate,
            ci_low=None,
            ci_high=None,
            is_converged=False,
            notes=[*answer.notes, *notes],
            passed=answer.bracket_low,
            failed=answer.bracket_high,
            num_seeds=answer.num_seeds_searched,
        )
    rates = [one.rate or 0.0 for one in done]
    told = [note for note in answer.notes if not any(note.startswith(f"Seed {seed}:") for seed in left_out)]
    if left_out:
        told.append(f"time for {len(done)} of {len(answer.seeds)} seeds; no seed {', '.join(left_out)}")
    return Goodput(
        target=answer.target,
        requests_per_s=statistics.fmean(rates),
        ci_low=answer.ci_low,
        ci_high=answer.ci_high,
        is_converged=True,
        notes=[*told, *(note for note in notes if "invalid" in note or "proves nothing" in note)],
        passed=min(rates),
        failed=max(one.failing_rate or 0.0 for one in done),
        num_seeds=len(done),
    )


def _measure(running: Running, settings: PlanSettings, how: RunSettings, backend: str) -> Measurement:
    environment = describe_environment(running.target, running.info, backend, None, 0)
    return measure(settings, how, running.target, environment, None)
