"""What was measured of each peer, and its means over rounds. Pure.

A round that the client marked invalid is in no mean and no ratio; `invalid_runs` says which and why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from bench.peers.after_burst import AFTER_BURST

MEMORY, FLOAT, FP32, INT8 = "memory", "floating point", "fp32", "int8"  # what binds a limit


class AfterBurst(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of a closed loop without its first burst, in milliseconds."""

    num_requests: int  # that succeeded
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """One closed-loop run. Latencies in milliseconds."""

    concurrency: int
    num_requests: int
    num_failed: int
    output_tok_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    valid: bool
    invalid_reasons: list[str] = []
    after_burst: AfterBurst | msgspec.UnsetType = msgspec.UNSET  # unset: no burst, none after it; older files


class SeedBracket(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed of a search ended with, requests per second."""

    seed: int
    passed: float | None  # the highest rate that passed; None: none did
    failed: float | None  # the lowest that failed; None: none did
    end: str  # as `bench.load.goodput.values.End` names it
    is_converged: bool
    is_counted: bool = True  # in the figure


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Max goodput at one target share, requests per second, with its 95 % interval where there is one. What
    is a figure, over which seeds, and when it is a lower bound: `bench.load.goodput.values.figure_of`.
    """

    target: float
    requests_per_s: float | None  # None: the search ended before any rate had passed; the notes say why
    ci_low: float | None
    ci_high: float | None
    is_converged: bool  # every seed ended that was worth a search; the figure may rest on fewer
    is_lower_bound: bool = False
    notes: list[str] = []
    passed: float | None = None  # lowest passing rate of the seeds it rests on
    failed: float | None = None  # their highest failing rate
    num_seeds: int = 0  # that it rests on
    seeds: list[SeedBracket] = []  # searched at all; empty in older files
    is_out_of_reach: bool = False  # not even requests one at a time met the target: a finding, and no gap
    max_probes: int | None = (
        None  # that the search of all targets was allowed; None in files without accounts
    )


class PeerOutcome(msgspec.Struct, kw_only=True):
    """One peer's row. `cannot_run` is the reason it has no, or not all, figures."""

    name: str
    title: str
    precision: str
    weight_bits: float
    kv_bits: float
    is_baton: bool
    arithmetic_bits: float | msgspec.UnsetType = msgspec.UNSET  # as `Peer` has it; not in older files
    settings: dict[str, str]
    versions: dict[str, str] = {}
    cannot_run: str | None = None
    start_s: list[float] = []  # one per start
    took_s: dict[str, float] = {}  # wall clock: `loops`, `search`, and `all` with starts and stops
    rounds: list[list[ClosedLoop]] = []
    goodput: list[Goodput] = []
    goodput_note: str | None = None  # why there is no goodput
    rounds_note: str | None = None  # why it has fewer rounds than others, at every load
    once: dict[int, str] = {}  # by concurrency: the same, at that load
    limits_tok_per_s: dict[int, float] = {}  # by concurrency: the most that machine and bytes allow
    limits_bound_by: dict[int, str] = {}  # by concurrency: MEMORY, or the arithmetic; empty in older files
    skipped: dict[int, str] = {}  # by concurrency: why it was not measured

    @property
    def precision_class(self) -> str:
        """What it may be held against as its equal: by the bits of a weight, scales included."""
        for name, least in (("32-bit", 32.0), ("16-bit", 16.0), ("8-bit", 8.0)):
            if self.weight_bits >= least:
                return name
        return "4-bit"


def closed_loop_from_result(result: Mapping[str, Any]) -> ClosedLoop:
    """From a result of `bench.load`; a figure that does not exist (nothing succeeded) becomes NaN."""

    def figure(key: str, of: Mapping[str, Any] = result) -> float:
        value = of[key]
        return float("nan") if value is None else float(value)

    after: AfterBurst | msgspec.UnsetType = msgspec.UNSET
    if (found := result.get(AFTER_BURST)) is not None:
        after = AfterBurst(
            num_requests=int(found["num"]),
            ttft_p50_ms=figure("median_ttft_ms", found),
            ttft_p99_ms=figure("p99_ttft_ms", found),
            tpot_p50_ms=figure("median_tpot_ms", found),
            tpot_p99_ms=figure("p99_tpot_ms", found),
        )
    return ClosedLoop(
        concurrency=int(result["max_concurrency"]),
        num_requests=int(result["num_prompts"]),
        num_failed=int(result["failed"]),
        output_tok_per_s=figure("output_throughput"),
        ttft_p50_ms=figure("median_ttft_ms"),
        ttft_p99_ms=figure("p99_ttft_ms"),
        tpot_p50_ms=figure("median_tpot_ms"),
        tpot_p99_ms=figure("p99_tpot_ms"),
        valid=bool(result["valid"]),
        invalid_reasons=[str(reason) for reason in result["invalid_reasons"]],
        after_burst=after,
    )


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the valid rounds at one concurrency, and the range of the throughput."""

    concurrency: int
    num_rounds: int
    num_requests: int  # per round
    num_failed: int  # of all rounds
    output_tok_per_s: float
    lowest_tok_per_s: float
    highest_tok_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    after_burst: AfterBurst | None = None  # over the rounds that have it; the requests of all of them


def runs_at(outcome: PeerOutcome, concurrency: int) -> list[ClosedLoop]:
    """Valid or not, one per round."""
    return [run for one in outcome.rounds for run in one if run.concurrency == concurrency]


def invalid_runs(outcome: PeerOutcome, concurrency: int) -> str | None:
    """Which rounds are left out of the mean, and why; None: none."""
    runs = runs_at(outcome, concurrency)
    bad = [run for run in runs if not run.valid]
    if not bad:
        return None
    reasons = dict.fromkeys(reason for run in bad for reason in run.invalid_reasons)
    return (
        f"{len(bad)} of {len(runs)} rounds left out, not valid: {' '.join(reasons) or 'no reason is given'}"
    )


def mean_of(outcome: PeerOutcome, concurrency: int) -> Mean | None:
    """None: nothing valid was measured at this concurrency."""
    runs = [run for run in runs_at(outcome, concurrency) if run.valid]
    if not runs:
        return None

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    rates = [run.output_tok_per_s for run in runs]
    after = [run.after_burst for run in runs if isinstance(run.after_burst, AfterBurst)]
    return Mean(
        concurrency=concurrency,
        num_rounds=len(runs),
        num_requests=runs[0].num_requests,
        num_failed=sum(run.num_failed for run in runs),
        output_tok_per_s=mean(rates),
        lowest_tok_per_s=min(rates),
        highest_tok_per_s=max(rates),
        ttft_p50_ms=mean(run.ttft_p50_ms for run in runs),
        ttft_p99_ms=mean(run.ttft_p99_ms for run in runs),
        tpot_p50_ms=mean(run.tpot_p50_ms for run in runs),
        tpot_p99_ms=mean(run.tpot_p99_ms for run in runs),
        after_burst=AfterBurst(
            num_requests=sum(one.num_requests for one in after),
            ttft_p50_ms=mean(one.ttft_p50_ms for one in after),
            ttft_p99_ms=mean(one.ttft_p99_ms for one in after),
            tpot_p50_ms=mean(one.tpot_p50_ms for one in after),
            tpot_p99_ms=mean(one.tpot_p99_ms for one in after),
        )
        if after
        else None,
    )


def best_peer(
    outcomes: Sequence[PeerOutcome], concurrency: int, precision_class: str | None = None
) -> tuple[PeerOutcome, Mean] | None:
    """The peer (never Baton) with the highest throughput, of one precision or of any; None: no peer was
    measured.
    """
    found = [
        (outcome, mean)
        for outcome in outcomes
        if not outcome.is_baton
        and precision_class in (None, outcome.precision_class)
        and (mean := mean_of(outcome, concurrency)) is not None
        and not math.isnan(mean.output_tok_per_s)
    ]
    return max(found, key=lambda pair: pair[1].output_tok_per_s, default=None)


def highest_load(family: Sequence[PeerOutcome]) -> int | None:
    """The most in flight at which any of them has a valid figure."""
    loads = {run.concurrency for outcome in family for one in outcome.rounds for run in one if run.valid}
    return max(loads, default=None)


def fastest(family: Sequence[PeerOutcome]) -> PeerOutcome | None:
    """The one with the highest throughput at `highest_load`."""
    load = highest_load(family)
    if load is None:
        return None
    found = [(mean, outcome) for outcome in family if (mean := mean_of(outcome, load)) is not None]
    return max(found, key=lambda pair: pair[0].output_tok_per_s)[1]
