"""The charts over load: latency here, goodput and attainment beside it; and throughput against user speed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.load.report.frame import Axis, Mark
from bench.load.report.goodput_charts import attainment_charts, goodput_chart
from bench.load.report.scales import duration, extent, quantity
from bench.load.report.sweep import (
    Reading,
    Sweep,
    curve,
    load_axis,
    means_table,
    num_loads,
    over,
    sweeps,
    unjoined_note,
)
from bench.load.report.values import (
    Block,
    Figure,
    Load,
    Omitted,
    ReportRun,
    Table,
    common_slo,
    load_name,
    number,
    percentile,
)
from bench.load.report.xy import Dot, Series, xy_chart

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "gap": "Worst gap", "e2el": "End-to-end latency"}
_MEANING = {
    "ttft": "Scheduled send time to first chunk with content",
    "tpot": "Mean time per output token after the first",
    "itl": "Gaps between chunks, pooled",
    "gap": "Longest gap between two chunks of a request",
    "e2el": "Scheduled send time to last byte",
}
SLO_OF_METRIC = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "gap": "gap", "e2el": "e2e"}
PERCENTS = ("50", "90", "99")
PERCENTS_OF_SEVERAL = ("50", "99")  # with several targets
_LOG_FROM = 30.0  # greatest over least from which an axis is logarithmic


def sweep_charts(runs: Sequence[ReportRun], has_knee: bool = True) -> list[Block]:
    """All charts over offered rate, and over requests in flight if runs were closed loop."""
    by_rate, by_flight = sweeps(runs, Load.RATE), sweeps(runs, Load.IN_FLIGHT)
    blocks: list[Block] = []
    for load, groups in ((Load.RATE, by_rate), (Load.IN_FLIGHT, by_flight)):
        if num_loads(groups) >= 2:
            blocks += [latency_chart(groups, load, metric) for metric in LATENCIES]
            blocks += [goodput_chart(groups, load, has_knee), *attainment_charts(groups, load)]
    if not blocks:
        reason = "each target ran at one load only; a sweep over rates draws it"
        titles = (
            "Latency against offered rate",
            "Goodput against offered rate",
            "SLO attainment against rate",
        )
        blocks += [Omitted(title, reason) for title in titles]
    blocks.append(pareto_chart(runs))
    return blocks


def latency_chart(groups: Sequence[Sweep], load: Load, metric: str) -> Block:
    """One line per target and percentile; colour tells targets apart if there are several, else these."""
    title = f"{LATENCIES[metric]} {over(load)}"
    is_single = len(groups) == 1
    series: list[Series] = []
    for i, sweep in enumerate(groups):
        for j, percent in enumerate(PERCENTS if is_single else PERCENTS_OF_SEVERAL):
            name = f"p{percent}" if is_single else f"{sweep.target} p{percent}"
            colour, shape = (j, j) if is_single else (i, i)
            reading = _percentile(metric, percent)
            one = curve(sweep, reading, name, load, "ms", colour=colour, dash=j, shape=shape)
            series += [one] if one is not None else []
    if not series:
        return Omitted(title, f"the result files have no {LATENCIES[metric]} percentiles")
    bound_ms = common_slo([run for sweep in groups for _, run in sweep.points], SLO_OF_METRIC[metric])
    across = [Mark(bound_ms, f"SLO {duration(bound_ms / 1e3)}", css="slo")] if bound_ms is not None else []
    span = extent(y for one in series for y in one.ys() if y > 0)
    is_log = span is not None and span[1] > _LOG_FROM * span[0]
    y_axis = Axis("ms, log scale" if is_log else "ms", is_log=is_log, lo=None if is_log else 0.0)
    chart = xy_chart(title, series, load_axis(load), y_axis, across=across, label_ends=is_single)
    note = f"{_MEANING[metric]}, of requests that ended OK.{unjoined_note(groups)}"
    return Figure(title, note, chart, means_table(series, load, "ms"))


def pareto_chart(runs: Sequence[ReportRun]) -> Block:
    """Output tokens per second of the system against those one user sees (1 / median TPOT)."""
    title = "Throughput against speed per user"
    groups: dict[str, list[tuple[float, float, ReportRun]]] = {}
    is_per_device = all((number(run.result, "num_accelerators") or 0) > 0 for run in runs)
    for run in runs:
        tpot_ms, rate = percentile(run.result, "tpot", "50"), number(run.result, "output_throughput")
        if tpot_ms is not None and tpot_ms > 0 and rate is not None:
            share = rate / (number(run.result, "num_accelerators") or 1.0) if is_per_device else rate
            groups.setdefault(run.target, []).append((1e3 / tpot_ms, share, run))
    if sum(len(points) for points in groups.values()) < 2:
        return Omitted(title, "it takes two runs with a TPOT and an output rate")
    unit = "tok/s per accelerator" if is_per_device else "tok/s"
    series = [
        Series(
            name=target,
            line=pareto_front([(x, y) for x, y, _ in points]),
            dots=[Dot(x, y, _pareto_tip(x, y, run, unit)) for x, y, run in points],
            colour=i,
            dash=i,
            shape=i,
        )
        for i, (target, points) in enumerate(groups.items())
    ]
    chart = xy_chart(
        title, series, Axis("tok/s per user (1 / median TPOT)", lo=0.0), Axis(f"output {unit}", lo=0.0)
    )
    rows = [
        [target, load_name(run.result), quantity(x), quantity(y)]
        for target, points in groups.items()
        for x, y, run in points
    ]
    table = Table(["target", "load", "tok/s per user", f"output {unit}"], rows)
    note = (
        "Up and right is better; the line joins the runs that no other run of the target beats on both axes."
    )
    return Figure(title, note, chart, table)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, by x ascending."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _pareto_tip(x: float, y: float, run: ReportRun, unit: str) -> str:
    where = f"{run.target}, {load_name(run.result)}"
    return f"{where}: {quantity(x)} tok/s per user, {quantity(y)} {unit}"


def _percentile(metric: str, percent: str) -> Reading:
    return lambda run: percentile(run.result, metric, percent)
