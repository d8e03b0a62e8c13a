"""The charts over load: latency, goodput, attainment, and the front of throughput against speed per user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.load.report.frame import Axis, Mark
from bench.load.report.scales import duration, extent, quantity
from bench.load.report.sweep import Reading, Sweep, curve, knee, num_loads, sweeps
from bench.load.report.values import (
    Block,
    Figure,
    Load,
    Omitted,
    ReportRun,
    Table,
    attainment,
    common_slo,
    load_name,
    mapping,
    number,
    percentile,
    target_name,
)
from bench.load.report.xy import Dot, Series, xy_chart

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "gap": "Worst gap", "e2el": "End-to-end latency"}
SLO_OF_METRIC = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "gap": "gap", "e2el": "e2e"}
PERCENTS = ("50", "90", "99")
SHARES = (0.9, 0.99)
_LOG_FROM = 30.0  # greatest over least from which an axis is logarithmic


def sweep_charts(runs: Sequence[ReportRun]) -> list[Block]:
    """All charts over offered rate, and over requests in flight if runs were closed loop."""
    by_rate, by_flight = sweeps(runs, Load.RATE), sweeps(runs, Load.IN_FLIGHT)
    blocks: list[Block] = []
    for load, groups in ((Load.RATE, by_rate), (Load.IN_FLIGHT, by_flight)):
        if num_loads(groups) >= 2:
            blocks += [latency_chart(groups, load, metric) for metric in LATENCIES]
            blocks += [goodput_chart(groups, load), attainment_chart(groups, load)]
    if not blocks:
        reason = "the runs are at one load only; a sweep over rates draws it"
        titles = (
            "Latency against offered rate",
            "Goodput against offered rate",
            "SLO attainment against rate",
        )
        blocks += [Omitted(title, reason) for title in titles]
    blocks.append(pareto_chart(runs))
    return blocks


def latency_chart(groups: Sequence[Sweep], load: Load, metric: str) -> Block:
    """One line per target and percentile; colour tells targets apart if there are several, else percentiles."""
    title = f"{LATENCIES[metric]} against {load.value.partition(' (')[0]}"
    series: list[Series] = []
    for i, sweep in enumerate(groups):
        for j, percent in enumerate(PERCENTS):
            name = f"p{percent}" if len(groups) == 1 else f"{sweep.target} p{percent}"
            colour = j if len(groups) == 1 else i
            one = curve(sweep, _percentile(metric, percent), name, load, "ms", colour=colour, dash=j, shape=j)
            series += [one] if one is not None else []
    if not series:
        return Omitted(title, f"the result files have no {LATENCIES[metric]} percentiles")
    bound_ms = common_slo([run for sweep in groups for _, run in sweep.points], SLO_OF_METRIC[metric])
    across = [Mark(bound_ms, f"SLO {duration(bound_ms / 1e3)}", css="slo")] if bound_ms is not None else []
    span = extent(y for one in series for y in one.ys() if y > 0)
    is_log = span is not None and span[1] > _LOG_FROM * span[0]
    y_axis = Axis("ms, log scale" if is_log else "ms", is_log=is_log, lo=None if is_log else 0.0)
    chart = xy_chart(title, series, _load_axis(load), y_axis, across=across, label_ends=len(series) <= 6)
    note = "Counted from the scheduled send time over requests that ended OK; "
    return Figure(
        title, note + "lines join means over seeds, bands span them.", chart, _table(series, load, "ms")
    )


def goodput_chart(groups: Sequence[Sweep], load: Load) -> Block:
    """Good requests per second; at an open loop also what was offered, and the knee."""
    title = f"Goodput against {load.value.partition(' (')[0]}"
    series: list[Series] = []
    has_slos = any(
        number(run.result, "request_goodput") is not None for sweep in groups for _, run in sweep.points
    )
    for i, sweep in enumerate(groups):
        suffix = "" if len(groups) == 1 else f" {sweep.target}"
        good = curve(
            sweep, _figure("request_goodput"), f"goodput{suffix}", load, "req/s", colour=i, dash=0, shape=i
        )
        done = curve(
            sweep,
            _figure("request_throughput"),
            f"completed{suffix}",
            load,
            "req/s",
            colour=i,
            dash=1,
            shape=i,
        )
        if done is not None and good is not None:
            done = Series(done.name, line=done.line, colour="muted" if len(groups) == 1 else i, dash=1)
        series += [one for one in (good, done) if one is not None]
    if not series:
        return Omitted(title, "the result files have neither goodput nor throughput")
    loads = [at for sweep in groups for at in sweep.loads()]
    if load is Load.RATE:
        ends = (min(loads), max(loads))
        series.append(Series("offered", line=[(end, end) for end in ends], colour="muted", dash=2))
    marks = [mark for sweep in groups for mark in _knees(sweep, len(groups) > 1)] if has_slos else []
    chart = xy_chart(title, series, _load_axis(load), Axis("req/s", lo=0.0), upright=marks)
    note = (
        "Requests per second that met every SLO. The knee is the highest load up to which every load measured "
        "had 90 % of its offered requests good."
    )
    if not has_slos:
        note = "No SLOs were set, so completed requests per second stand in for goodput."
    return Figure(title, note, chart, _table(series, load, "req/s"))


def attainment_chart(groups: Sequence[Sweep], load: Load) -> Block:
    """Percent of offered requests inside each SLO and inside all of them."""
    title = f"SLO attainment against {load.value.partition(' (')[0]}"
    series: list[Series] = []
    for i, sweep in enumerate(groups):
        names = dict.fromkeys(
            name for _, run in sweep.points for name in mapping(run.result, "slo_attainment_by_metric")
        )
        suffix = "" if len(groups) == 1 else f" {sweep.target}"
        lone = len(names) <= 1  # the joint line says it all
        for j, name in enumerate(() if lone else names, start=1):
            colour, dash = (j, j) if len(groups) == 1 else (i, j)
            reading = _percent_of("slo_attainment_by_metric", name)
            one = curve(
                sweep, reading, _slo_name(name) + suffix, load, "%", colour=colour, dash=dash, shape=j
            )
            series += [one] if one is not None else []
        joint = curve(
            sweep, _percent_of("slo_attainment"), "all SLOs" + suffix, load, "%", colour=i, dash=0, shape=0
        )
        series += [joint] if joint is not None else []
    if not series:
        return Omitted(title, "no SLOs were set")
    across = [Mark(share * 100, f"{share * 100:.0f} %") for share in SHARES]
    chart = xy_chart(
        title, series, _load_axis(load), Axis("% of offered requests", lo=0.0, hi=100.0), across=across
    )
    note = "Failed and unsent requests count as missed."
    return Figure(title, note, chart, _table(series, load, "%"))


def pareto_chart(runs: Sequence[ReportRun]) -> Block:
    """Output tokens per second of the system against those one user sees (1 / median TPOT)."""
    title = "Throughput against speed per user"
    groups: dict[str, list[tuple[float, float, ReportRun]]] = {}
    is_per_device = all((number(run.result, "num_accelerators") or 0) > 0 for run in runs)
    for run in runs:
        tpot_ms, rate = percentile(run.result, "tpot", "50"), number(run.result, "output_throughput")
        if tpot_ms is not None and tpot_ms > 0 and rate is not None:
            share = rate / (number(run.result, "num_accelerators") or 1.0) if is_per_device else rate
            groups.setdefault(target_name(run.result), []).append((1e3 / tpot_ms, share, run))
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
    where = f"{target_name(run.result)}, {load_name(run.result)}"
    return f"{where}: {quantity(x)} tok/s per user, {quantity(y)} {unit}"


def _load_axis(load: Load) -> Axis:
    return Axis(load.value, lo=0.0)


def _percentile(metric: str, percent: str) -> Reading:
    return lambda run: percentile(run.result, metric, percent)


def _figure(key: str) -> Reading:
    return lambda run: number(run.result, key)


def _percent_of(*keys: str) -> Reading:
    def read(run: ReportRun) -> float | None:
        share = number(run.result, *keys)
        return None if share is None else share * 100

    return read


def _slo_name(name: str) -> str:
    return {"gap": "worst gap"}.get(name, name.upper() if len(name) <= 4 else name)


def _knees(sweep: Sweep, is_named: bool) -> list[Mark]:
    if all(attainment(run.result) is None for _, run in sweep.points):
        return []
    at = knee(sweep, SHARES[0])
    if at is None:
        return []
    name = f"{sweep.target}: " if is_named else ""
    return [Mark(at, f"{name}knee {quantity(at)}", css="ref knee")]


def _table(series: Sequence[Series], load: Load, unit: str) -> Table:
    """One row per load, one column per line: the means over seeds."""
    columns = [one for one in series if one.dots or one.line]
    loads = sorted({x for one in columns for x, _ in one.line})
    values: list[Mapping[float, float]] = [dict(one.line) for one in columns]
    rows = [
        [quantity(at), *(quantity(column[at]) if at in column else "–" for column in values)] for at in loads
    ]
    return Table([load.value, *(f"{one.name} ({unit})" for one in columns)], rows)
