"""What was measured of each peer, and what follows from it: means over rounds, ratios, losses. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec


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


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Max goodput at one target share, requests per second, with its 95 % interval where there is one."""

    target: float
    requests_per_s: float | None  # None: the search ended before any rate had passed; the notes say why
    ci_low: float | None
    ci_high: float | None
    is_converged: bool
    notes: list[str] = []


class PeerOutcome(msgspec.Struct, kw_only=True):
    """One peer's row. `cannot_run` is the reason it has no, or not all, figures."""

    name: str
    title: str
    precision: str
    weight_bits: float
    kv_bits: float
    is_baton: bool
    settings: dict[str, str]
    versions: dict[str, str] = {}
    cannot_run: str | None = None
    start_s: list[float] = []  # one per start
    rounds: list[list[ClosedLoop]] = []
    goodput: list[Goodput] = []
    goodput_note: str | None = None  # why there is no goodput
    rounds_note: str | None = None  # why it has fewer rounds than others
    limits_tok_per_s: dict[int, float] = {}  # by concurrency: the most that machine and bytes allow

    skipped: dict[int, str] = {}  # by concurrency: why it was not measured

    @property
    def is_equal_dtype(self) -> bool:
        """16-bit weights, as Baton's."""
        return self.weight_bits == 16


def closed_loop_from_result(result: Mapping[str, Any]) -> ClosedLoop:
    """From a result of `bench.load`; a figure that does not exist (nothing succeeded) becomes NaN."""

    def figure(key: str) -> float:
        value = result[key]
        return float("nan") if value is None else float(value)

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
    )


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """Means over rounds at one concurrency, and the range of the throughput."""

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
    invalid_reasons: tuple[str, ...]


def mean_of(outcome: PeerOutcome, concurrency: int) -> Mean | None:
    """None: nothing was measured at this concurrency."""
    runs = [run for one in outcome.rounds for run in one if run.concurrency == concurrency]
    if not runs:
        return None

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    rates = [run.output_tok_per_s for run in runs]
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
        invalid_reasons=tuple(dict.fromkeys(r for run in runs for r in run.invalid_reasons)),
    )


def best_peer(
    outcomes: Sequence[PeerOutcome], concurrency: int, *, equal_dtype_only: bool = False
) -> tuple[PeerOutcome, Mean] | None:
    """The peer (never Baton) with the highest throughput; None: no peer was measured."""
    found = [
        (outcome, mean)
        for outcome in outcomes
        if not outcome.is_baton
        and (outcome.is_equal_dtype or not equal_dtype_only)
        and (mean := mean_of(outcome, concurrency)) is not None
    ]
    return max(found, key=lambda pair: pair[1].output_tok_per_s, default=None)


def far_behind(outcome: PeerOutcome, outcomes: Sequence[PeerOutcome]) -> bool:
    """Less than half of the best peer's throughput at every load measured: another round would change none
    of the ratios that matter. Never Baton."""
    if outcome.is_baton:
        return False
    loads = {run.concurrency for one in outcome.rounds for run in one}
    for concurrency in loads:
        own, best = mean_of(outcome, concurrency), best_peer(outcomes, concurrency)
        if own is None or best is None or own.output_tok_per_s * 2 >= best[1].output_tok_per_s:
            return False
    return bool(loads)


def fastest(family: Sequence[PeerOutcome]) -> PeerOutcome | None:
    """The one with the highest throughput at the highest load that any of them was measured at."""
    loads = {run.concurrency for outcome in family for one in outcome.rounds for run in one}
    if not loads:
        return None
    found = [(mean, outcome) for outcome in family if (mean := mean_of(outcome, max(loads))) is not None]
    return max(found, key=lambda pair: pair[0].output_tok_per_s)[1]


# field of `Mean`, what it is called, its unit, whether more is better
_COMPARED = (
    ("output_tok_per_s", "output", "tok/s", True),
    ("ttft_p50_ms", "median TTFT", "ms", False),
    ("tpot_p50_ms", "median TPOT", "ms", False),
)


def losses(outcomes: Sequence[PeerOutcome], concurrencies: Sequence[int]) -> list[str]:
    """One sentence for each figure of Baton's that some peer beats; names the best peer and the ratio."""
    sentences = []
    for baton in (outcome for outcome in outcomes if outcome.is_baton):
        for concurrency in concurrencies:
            own = mean_of(baton, concurrency)
            if own is None:
                continue
            rivals = [
                (outcome.title, mean)
                for outcome in outcomes
                if not outcome.is_baton and (mean := mean_of(outcome, concurrency)) is not None
            ]
            for field, name, unit, more_is_better in _COMPARED:
                if not rivals:
                    continue
                choose = max if more_is_better else min
                title, best = choose(rivals, key=lambda rival: float(getattr(rival[1], field)))
                mine, theirs = float(getattr(own, field)), float(getattr(best, field))
                if (mine < theirs) if more_is_better else (mine > theirs):
                    ratio = mine / theirs
                    sentences.append(
                        f"{baton.title}, {concurrency} in flight: {name} of {mine:.4g} {unit} is {ratio:.2f} "
                        f"times that of {title} ({theirs:.4g} {unit})."
                    )
    return sentences


def goodput_losses(outcomes: Sequence[PeerOutcome]) -> list[str]:
    """The same for max goodput, per target."""
    sentences = []
    for baton in (outcome for outcome in outcomes if outcome.is_baton):
        for own in baton.goodput:
            rivals = [
                (other.requests_per_s, outcome.title)
                for outcome in outcomes
                if not outcome.is_baton
                for other in outcome.goodput
                if other.target == own.target and other.requests_per_s is not None
            ]
            best, title = max(rivals, default=(0.0, ""))
            if own.requests_per_s is None:
                if best > 0:
                    sentences.append(
                        f"{baton.title}: of the rates probed none passed at {own.target:.0%}; {title} passed "
                        f"{best:.3g} req/s."
                    )
                continue
            if best > own.requests_per_s:
                sentences.append(
                    f"{baton.title}: max goodput at {own.target:.0%} of {own.requests_per_s:.3g} req/s is "
                    f"{own.requests_per_s / best:.2f} times that of {title} ({best:.3g} req/s)."
                )
    return sentences
