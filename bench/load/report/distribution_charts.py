"""What one or several runs were made of: TTFT and ITL as cumulative shares, lengths as histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.load.figures.latency import derive, output_len
from bench.load.records import RequestRecord, RunRecord, Status
from bench.load.report.bars import histogram, make_bins
from bench.load.report.frame import NUM_COLOURS, Axis, Mark
from bench.load.report.scales import duration, quantity
from bench.load.report.values import (
    Block,
    Figure,
    Omitted,
    ReportRun,
    Table,
    common_slo,
    measured_span,
)
from bench.load.report.xy import Dot, Series, xy_chart

MAX_CDF_POINTS = 400
MAX_STEPS = 150  # up to so many values the curve is drawn as the staircase it is
FLOOR_MS = 0.1  # gaps below it are chunks that one read brought
_STRETCH = 3.0  # the fastest percent stretches a log axis if its least value is this much below the rest
MAX_CDF_RUNS = NUM_COLOURS
_TOLD = (50.0, 90.0, 99.0)
_TAIL_FROM = 0.95
_LEAST_MS, _GREATEST_MS = 1e-3, 1e9

T = TypeVar("T")
Floats = NDArray[np.float64]
Reading = Callable[[ReportRun], Floats]


def cdf_points(values: Floats, limit: int = MAX_CDF_POINTS) -> list[tuple[float, float]]:
    """(value, percent at or below it) of sorted values: at most `limit`, a quarter in the slowest 5 %.

    First and last value are always among them.
    """
    ordered = np.sort(values)
    num = len(ordered)
    if num == 0:
        return []
    if num <= limit:
        ranks = np.arange(num)
    else:
        tail = max(1, limit // 4)
        body = np.linspace(0, (num - 1) * _TAIL_FROM, limit - tail, endpoint=False)
        ranks = np.unique(
            np.concatenate([body, np.linspace((num - 1) * _TAIL_FROM, num - 1, tail)]).astype(np.int64)
        )
    return [(float(ordered[rank]), float(rank + 1) * 100.0 / num) for rank in ranks]


def cdf_line(values: Floats) -> list[tuple[float, float]]:
    """What is drawn of sorted values: a step up at each where they are few, else `cdf_points`."""
    points = cdf_points(values)
    if len(values) > MAX_STEPS:
        return points
    steps: list[tuple[float, float]] = []
    below = 0.0
    for x, y in points:
        steps += [(x, below), (x, y)]
        below = y
    return steps


def floor_ms(samples: Sequence[Floats]) -> float:
    """Where the curves begin: at the least value, unless a few very small ones would stretch the log axis.

    Then at the 1st percentile, but not below `FLOOR_MS`; never above a median.
    """
    floors = []
    for values in samples:
        least, first, median = (float(q) for q in np.percentile(values, (0, 1, 50)))
        bound = min(max(first, FLOOR_MS), median)
        floors.append(least if least > 0 and least * _STRETCH >= bound else bound)
    return max(min(floors), _LEAST_MS)


def ttfts_ms(run: ReportRun) -> Floats:
    """Of requests that ended OK."""
    values = [derive(record).ttft_s for record in measured(run)]
    return np.array([value for value in values if value is not None], dtype=np.float64) * 1e3


def itls_ms(run: ReportRun) -> Floats:
    """All gaps between chunks of requests that ended OK, pooled."""
    pooled = [np.diff(record.chunk_times_s) for record in measured(run) if len(record.chunk_times_s) > 1]
    return (np.concatenate(pooled) if pooled else np.array([], dtype=np.float64)) * 1e3


def measured(run: ReportRun) -> list[RequestRecord]:
    """The requests behind the latencies of the result file: ended OK, scheduled in the window."""
    span = measured_span(run.result)
    done = _done(run.records) if run.records is not None else []
    return [r for r in done if span is None or span[0] <= r.scheduled_s <= span[1]]


def cdf_charts(runs: Sequence[ReportRun], names: Sequence[str]) -> list[Block]:
    return [
        _cdf_chart(runs, names, "TTFT", "ttft", "measured requests that ended OK", ttfts_ms),
        _cdf_chart(
            runs,
            names,
            "ITL",
            "itl",
            "gaps between chunks, pooled over measured requests that ended OK",
            itls_ms,
        ),
    ]


def _cdf_chart(
    runs: Sequence[ReportRun], names: Sequence[str], metric: str, slo: str, of_what: str, reading: Reading
) -> Block:
    title = f"{metric} distribution"
    seen = [(name, run) for name, run in zip(names, runs, strict=True) if run.records is not None]
    if not seen:
        return Omitted(title, "no per-request records at hand")
    samples = [(name, run, values) for name, run in seen if len(values := reading(run))]
    if not samples:
        return Omitted(title, f"there are no {of_what}")
    floor = floor_ms([values for _, _, values in samples])
    by_target: dict[str, list[tuple[str, Floats]]] = {}
    for name, run, values in samples:
        by_target.setdefault(run.target, []).append((name, values))
    each = max(1, MAX_CDF_RUNS // len(by_target))
    chosen = [evenly(mine, each) for mine in by_target.values()]
    shown = [one for mine in chosen for one in mine]
    if len(by_target) == 1:
        series = [_cdf_series(*one, floor, colour=i, dash=i, shape=i) for i, one in enumerate(shown)]
    else:
        series = [
            _cdf_series(*one, floor, colour=i, dash=j, shape=i)
            for i, mine in enumerate(chosen)
            for j, one in enumerate(mine)
        ]
    bound_ms = common_slo(runs, slo)
    upright = [Mark(bound_ms, f"SLO {duration(bound_ms / 1e3)}", css="slo")] if bound_ms is not None else []
    y_axis = Axis("% at or below", lo=0.0, hi=100.0)
    chart = xy_chart(
        title, series, Axis("ms, log scale", is_log=True), y_axis, upright=upright, is_label_low=True
    )
    left_out = f" {len(shown)} of {len(samples)} runs are drawn." if len(shown) < len(samples) else ""
    headers = ["run", "n", *(f"p{p:g} (ms)" for p in _TOLD), "greatest (ms)"]
    rows = [
        [name, f"{len(v):,}", *(quantity(float(q)) for q in [*np.percentile(v, _TOLD), v.max()])]
        for name, v in shown
    ]
    num_below = sum(int(np.count_nonzero(values < floor)) for _, values in shown)
    clipped = (
        f" {num_below:,} of {sum(len(values) for _, values in shown):,} lie below {duration(floor / 1e3)} "
        "and are drawn there."
        if num_below
        else ""
    )
    note = f"Over {of_what}; points mark p50, p90 and p99.{clipped}{left_out}"
    return Figure(title, note, chart, Table(headers, rows))


def _cdf_series(name: str, values: Floats, floor: float, *, colour: int, dash: int, shape: int) -> Series:
    """Its points lie on the curve; their tips tell the percentiles as every table does, interpolated."""

    def place(x: float) -> float:
        return min(max(x, floor), _GREATEST_MS)

    on_curve = np.percentile(values, _TOLD, method="inverted_cdf")
    dots = [
        Dot(place(float(x)), p, f"{name}: p{p:g} {duration(float(q) / 1e3)} (n = {len(values):,})")
        for p, x, q in zip(_TOLD, on_curve, np.percentile(values, _TOLD), strict=True)
    ]
    line = [(place(x), y) for x, y in cdf_line(values)]
    return Series(name, line=line, dots=dots, colour=colour, dash=dash, shape=shape)


def length_charts(run: RunRecord) -> list[Block]:
    """Input lengths of all offered requests (usage, else the plan), output lengths of those that ended OK."""
    inputs = [length for record in run.records if (length := _input_len(record)) is not None]
    outputs = [output_len(record) for record in _done(run)]
    return [
        _lengths("Input length", inputs, "offered requests", 0, "no request's input length is known"),
        _lengths("Output length", outputs, "requests that ended OK", 2, "no request ended OK"),
    ]


def _lengths(title: str, values: Sequence[int], of_what: str, colour: int, reason: str) -> Block:
    if not values:
        return Omitted(title, reason)
    if min(values) == max(values):
        return Omitted(title, f"all {len(values):,} {of_what} have {values[0]:,} tokens")
    bins = make_bins([float(value) for value in values])
    median = float(np.median(values))
    is_each = bins[0].hi - bins[0].lo == 1
    names = [f"{b.lo:,.0f}" if is_each else f"{b.lo:,.0f}–{b.hi - 1:,.0f}" for b in bins]
    chart = histogram(
        title,
        bins,
        Axis("tokens"),
        Axis("requests", lo=0.0),
        [f"{name} tokens: {b.count:,} requests" for name, b in zip(names, bins, strict=True)],
        colour=colour,
        upright=[Mark(median, f"median {quantity(median)}")],
    )
    rows = [[name, f"{b.count:,}"] for name, b in zip(names, bins, strict=True) if b.count]
    note = (
        f"{len(values):,} {of_what}: mean {quantity(float(np.mean(values)))}, longest {max(values):,} tokens."
    )
    return Figure(title, note, chart, Table(["tokens", "requests"], rows))


def _input_len(record: RequestRecord) -> int | None:
    return record.planned_input_tokens if record.input_tokens is None else record.input_tokens


def _done(run: RunRecord) -> list[RequestRecord]:
    return [record for record in run.records if record.status is Status.OK]


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, evenly spaced, first and last included."""
    if len(items) <= limit:
        return list(items)
    if limit <= 1:
        return list(items[:limit])
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
