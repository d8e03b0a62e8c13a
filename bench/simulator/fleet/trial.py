"""One simulated run at one rate, and what became of its requests, by the definitions of `baton bench`.

1. `Setup` says what is run: pool, trace, policy, SLO, length.
2. `run_trial` offers the trace at a rate and drains what is in flight.
3. Requests that arrive in the first fifth (the batch is not full yet) and the last tenth are not measured;
   all others are, whatever became of them.

How long: ten times the life of a request within its targets, since the decode batch needs several lives to
build up, 40 to 240 s, and at least `MIN_REQUESTS` requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from bench.load.figures.latency import Latency
from bench.load.figures.metrics import DEFAULT_PERCENTILES, distribution
from bench.load.figures.slo import Slo, SloMetric, evaluate
from bench.load.plans.trace_formats import TraceRow
from bench.load.records import Status
from bench.simulator.fleet.policies import PolicySpec
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.workload import make_requests
from bench.simulator.hardware import Hardware, names_of
from cluster.errors import ConfigError
from cluster.slo_classes import Targets

WARM_UP, COOL_DOWN = 0.2, 0.1
MIN_LENGTH_S, MAX_LENGTH_S, LIVES = 40.0, 240.0, 10
MIN_REQUESTS = 1_000
MAX_REQUESTS = 5_000_000  # of a run: about 2 GB
PARTS = 200  # of a run, after each of which it says how far it is


@dataclass(frozen=True, slots=True)
class Setup:
    """`length_s`: seconds of arrivals, or more if fewer than `MIN_REQUESTS` come; None: see the module."""

    rows: Sequence[TraceRow]
    pool: Sequence[Hardware]
    policy: PolicySpec
    slos: tuple[Slo, ...]
    length_s: float | None = None
    own_rhythm: bool = False
    use_prefix_cache: bool = True

    @property
    def targets(self) -> Targets:
        return targets_of(self.slos)

    @property
    def offered_s(self) -> float:
        if self.length_s is not None:
            return self.length_s
        targets = self.targets
        life_s = targets.ttft_s + targets.tpot_s * fmean(row.output_tokens for row in self.rows)
        return min(max(LIVES * life_s, MIN_LENGTH_S), MAX_LENGTH_S)

    def num_requests(self, rate: float) -> int:
        return max(round(rate * self.offered_s), MIN_REQUESTS)


def targets_of(slos: Sequence[Slo]) -> Targets:
    """
    Raises:
        ConfigError: a bound that the policies do not plan for, or TTFT or TPOT is missing.
    """
    bounds = {slo.metric: slo.bound_s for slo in slos}
    for metric in (SloMetric.TTFT, SloMetric.TPOT):
        if metric not in bounds:
            raise ConfigError(f"--slo lacks `{metric.value}`: write it like `ttft=0.5s,tpot=25ms`")
    for metric in (SloMetric.ITL, SloMetric.E2E):
        if metric in bounds:
            raise ConfigError(f"--slo `{metric.value}`: a simulation knows ttft, tpot and gap; leave it out")
    gap_s = bounds.get(SloMetric.GAP)
    targets = Targets(bounds[SloMetric.TTFT], bounds[SloMetric.TPOT])
    return targets if gap_s is None else Targets(targets.ttft_s, targets.tpot_s, gap_s)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second; shares of all requests that were measured."""

    rate: float
    seed: int
    attainment: float
    attainment_by_metric: dict[str, float]
    num_offered: int  # measured ones
    num_finished: int  # of them
    num_rejected: int
    goodput: float  # good requests per second
    output_throughput: float
    distributions: dict[str, dict[str, float | None]]
    num_preemptions: int
    cached_tokens: int
    transferred_bytes: float
    facts: dict[str, Any]
    num_steps: int
    simulated_s: float
    wall_s: float


def run_trial(
    setup: Setup, rate: float, seed: int, on_progress: Callable[[float], None] | None = None
) -> Outcome:
    """Deterministic but for `wall_s`. `on_progress` takes the share of the arrivals' time that is over.

    Raises:
        ConfigError: the run would have more than `MAX_REQUESTS`.
    """
    started = time.perf_counter()
    num_requests = setup.num_requests(rate)
    if num_requests > MAX_REQUESTS:
        raise ConfigError(
            f"{setup.offered_s:,.0f} s at {rate:.4g} req/s are {num_requests:,} requests, more than the "
            f"{MAX_REQUESTS:,} of a run: give a shorter --duration or a lower --rate, or use "
            "`python -m bench.simulator.large`"
        )
    requests = make_requests(setup.rows, rate, num_requests, seed, setup.own_rhythm)
    targets = setup.targets
    policy = setup.policy.make(targets, setup.use_prefix_cache)
    simulation = Simulation(setup.pool, requests, policy, targets.tpot_s, setup.use_prefix_cache)
    end_s = requests[-1].arrival_s
    measured = [r for r in requests if end_s * WARM_UP <= r.arrival_s <= end_s * (1 - COOL_DOWN)]
    for part in range(1, PARTS if on_progress is not None else 1):
        simulation.run(end_s * part / PARTS)
        if on_progress is not None:
            on_progress(part / PARTS)
    simulation.run(end_s + _drain_s(measured, targets))
    latencies = [_latency(request) for request in measured]
    verdicts = [
        evaluate(setup.slos, Status.OK if x.e2e_s is not None else Status.TIMEOUT, x) for x in latencies
    ]
    num_good = sum(map(all, verdicts))
    finished = [x for x in latencies if x.e2e_s is not None]
    span_s = end_s * (1 - WARM_UP - COOL_DOWN)
    samples = {
        "ttft": [x.ttft_s for x in latencies],
        "tpot": [x.tpot_s for x in finished],
        "gap": [x.gap_s for x in finished],
        "e2el": [x.e2e_s for x in finished],
    }
    return Outcome(
        rate=rate,
        seed=seed,
        attainment=num_good / len(measured),
        attainment_by_metric={
            slo.metric.value: sum(met[i] for met in verdicts) / len(measured)
            for i, slo in enumerate(setup.slos)
        },
        num_offered=len(measured),
        num_finished=len(finished),
        num_rejected=sum(request.is_rejected for request in measured),
        goodput=num_good / span_s,
        output_throughput=sum(x.output_len for x in finished) / span_s,
        distributions={
            name: _figures([value for value in values if value is not None])
            for name, values in samples.items()
        },
        num_preemptions=simulation.num_preemptions,
        cached_tokens=simulation.num_cached_tokens,
        transferred_bytes=simulation.transferred_bytes,
        facts=policy.facts(),
        num_steps=simulation.num_steps,
        simulated_s=simulation.now,
        wall_s=time.perf_counter() - started,
    )


def _drain_s(measured: Sequence[Request], targets: Targets) -> float:
    """After this long a request that has not ended has missed its targets."""
    longest = max(request.num_output for request in measured)
    return targets.ttft_s + targets.tpot_s * longest


def _latency(request: Request) -> Latency:
    first_s, finish_s = request.first_s, request.finish_s
    has_more = request.num_output > 1
    return Latency(
        output_len=request.num_output,
        ttft_s=None if first_s is None else first_s - request.arrival_s,
        tpot_s=request.tpot_s if has_more and finish_s is not None else None,
        itl_s=None,
        gap_s=request.worst_gap_s if has_more and finish_s is not None else None,
        e2e_s=None if finish_s is None else finish_s - request.arrival_s,
        send_lag_s=0.0,
        ttft_from_send_s=None,
        e2e_from_send_s=None,
    )


def _figures(values_s: Sequence[float]) -> dict[str, float | None]:
    found = distribution(values_s, DEFAULT_PERCENTILES)
    return {
        "num": found.num,
        "mean_s": found.mean_s,
        **{f"p{name}_s": value for name, value in found.percentiles_s.items()},
        "max_s": found.max_s,
    }


def too_large(setup: Setup) -> list[str]:
    """A sentence if some requests fit on no worker: the simulation rejects them."""
    largest = max(kind.kv_tokens for kind in setup.pool)
    count = sum(row.input_tokens + row.output_tokens > largest for row in setup.rows)
    if not count:
        return []
    return [
        f"{count:,} of the trace's {len(setup.rows):,} requests can never be served: prompt and answer are "
        f"more than the {largest:,} tokens of KV that the largest worker holds."
    ]


def lengthened(setup: Setup, rates: Sequence[float]) -> list[str]:
    """A sentence if runs at the slowest of these rates take longer than asked for."""
    rate = min(rates)
    if setup.length_s is None or rate * setup.length_s >= MIN_REQUESTS:
        return []
    return [
        f"--duration {setup.length_s:g} is too short at {rate:.4g} req/s: a run has at least "
        f"{MIN_REQUESTS:,} requests, so about {MIN_REQUESTS / rate:,.1f} s are simulated instead."
    ]


def impossible(setup: Setup) -> list[str]:
    """A sentence for each kind that can meet no request's targets whatever the load."""
    targets = setup.targets
    limit_s = min(targets.tpot_s, targets.gap_s)
    sentences = []
    for kind, name in names_of(setup.pool).items():
        least_s = kind.model.fixed_s + kind.model.floor_s
        if least_s > limit_s:
            sentences.append(
                f"{name}: its shortest step takes {least_s * 1e3:.3g} ms, so no decode on it meets "
                f"{limit_s * 1e3:.3g} ms per token."
            )
    shortest = min(row.input_tokens for row in setup.rows)
    least_ttft_s = min(
        kind.model.fixed_s + max(kind.model.floor_s, kind.model.per_token_s * shortest) for kind in setup.pool
    )
    if least_ttft_s > targets.ttft_s:
        sentences.append(
            f"The shortest prompt ({shortest} tokens) takes {least_ttft_s * 1e3:.3g} ms on an idle worker, "
            f"so no request meets a TTFT of {targets.ttft_s * 1e3:.3g} ms."
        )
    return sentences
