"""Goodput and SLO attainment over load, with the knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.load.report.frame import Axis, Mark
from bench.load.report.scales import quantity
from bench.load.report.sweep import (
    Sweep,
    curve,
    knee,
    load_axis,
    means,
    means_table,
    measured,
    over,
    unjoined_note,
)
from bench.load.report.values import Block, Figure, Load, Omitted, ReportRun, mapping, number
from bench.load.report.xy import Dot, Series, xy_chart

SHARES = (0.9, 0.99)
_KNEE_WORDS = (
    "Requests per second that met every SLO. The ring marks the knee: the highest load up to which every "
    "load measured had 90 % of its offered requests good."
)


def goodput_chart(groups: Sequence[Sweep], load: Load, has_knee: bool = True) -> Block:
    """Good requests per second, what was offered at an open loop, and the knee of each target.

    One target: what was completed too, and a line at the knee. Without SLOs completed requests stand in. The
    probes of a search have no knee: its answer is more than that.
    """
    title = f"Goodput {over(load)}"
    has_slos = any(_goodput(run) is not None for sweep in groups for _, run in sweep.points)
    reading, kind = (_goodput, "goodput") if has_slos else (_completed, "completed")
    is_single = len(groups) == 1
    series: list[Series] = []
    rings: list[Dot] = []
    for i, sweep in enumerate(groups):
        name = kind if is_single else sweep.target
        main = curve(sweep, reading, name, load, "req/s", colour=i, dash=i, shape=i)
        series += [main] if main is not None else []
        rings += _rings(sweep) if has_slos and has_knee else []
    if not series:
        return Omitted(title, "the result files have neither goodput nor throughput")
    if is_single and has_slos and groups[0].is_joined:
        done = curve(groups[0], _completed, "completed", load, "req/s", colour="muted", dash=1, shape=0)
        series += [replace(done, dots=(), band=())] if done is not None else []
    if load is Load.RATE:
        series.append(Series("offered", line=offered_line(groups), colour="muted", dash=2))
    table = means_table(series, load, "req/s")
    if rings:
        series.append(Series("knee", dots=rings, colour="ink", shape=0, is_ring=True))
    knees = [at for sweep in groups if (at := knee(sweep, SHARES[0])) is not None]
    upright = [
        Mark(ring.x, f"knee {quantity(at)}", css="ref knee") for at, ring in zip(knees, rings, strict=False)
    ]
    chart = xy_chart(
        title, series, load_axis(load), Axis("req/s", lo=0.0), upright=upright if is_single else []
    )
    note = (
        _KNEE_WORDS if has_slos else "No SLOs were set: requests completed per second stand in for goodput."
    )
    if has_slos and not rings:
        note = "Requests per second that met every SLO."
        if has_knee:
            note += " No knee: fewer than 90 % were good at the lowest load, or there is one load only."
    return Figure(title, note + unjoined_note(groups), chart, table)


def offered_line(groups: Sequence[Sweep]) -> list[tuple[float, float]]:
    """Requests offered per second over the rate at which they were: what goodput is a part of.

    Rates are over the gaps between requests, goodput over the measured time; of short runs with few requests
    the offered ones per measured time may be the larger, and goodput never lies above that.
    """
    found: dict[float, float] = {}
    for sweep in groups:
        for at, run in sweep.points:
            place = sweep.place(at, run)
            num, seconds = number(run.result, "num_prompts"), number(run.result, "duration")
            per_s = num / seconds if num is not None and seconds else 0.0
            found[place] = max(found.get(place, 0.0), place, per_s)
    return sorted(found.items())


def _rings(sweep: Sweep) -> list[Dot]:
    at = knee(sweep, SHARES[0])
    height = {load: mean for load, mean, _, _ in means(measured(sweep, _goodput))}
    if at is None or at not in height:
        return []
    tip = f"{sweep.target}: knee at {quantity(at)}, goodput {quantity(height[at])} req/s"
    return [Dot(sweep.mean_place(at), height[at], tip)]


def attainment_charts(groups: Sequence[Sweep], load: Load) -> list[Block]:
    """Percent of offered requests inside each SLO and inside all; with several targets a chart for each."""
    title = f"SLO attainment {over(load)}"
    names = dict.fromkeys(
        name
        for sweep in groups
        for _, run in sweep.points
        for name in mapping(run.result, "slo_attainment_by_metric")
    )
    joint = ("slo_attainment",)
    each = [("slo_attainment_by_metric", name) for name in names if len(names) > 1]
    if len(groups) == 1:
        paths = [*enumerate(each, start=1), (0, joint)]  # the joint line is drawn last, upon the others
        found = [_share_curve(groups[0], path, _slo_name(path[-1]), load, i) for i, path in paths]
        return [_attainment(title, found, load, groups)]
    blocks: list[Block] = []
    for path in (joint, *each):
        found = [_share_curve(sweep, path, sweep.target, load, i) for i, sweep in enumerate(groups)]
        blocks.append(_attainment(f"{title}: {_slo_name(path[-1])}", found, load, groups))
    return blocks


def _attainment(title: str, found: Sequence[Series | None], load: Load, groups: Sequence[Sweep]) -> Block:
    series = [one for one in found if one is not None]
    if not series:
        return Omitted(title, "no SLOs were set")
    across = [Mark(share * 100, f"{share * 100:.0f} %") for share in SHARES]
    y_axis = Axis("% of offered requests", lo=0.0, hi=100.0)
    chart = xy_chart(title, series, load_axis(load), y_axis, across=across)
    note = f"Failed and unsent requests count as missed.{unjoined_note(groups)}"
    return Figure(title, note, chart, means_table(series, load, "%"))


def _share_curve(sweep: Sweep, path: Sequence[str], name: str, load: Load, i: int) -> Series | None:
    def percent(run: ReportRun) -> float | None:
        share = number(run.result, *path)
        return None if share is None else share * 100

    return curve(sweep, percent, name, load, "%", colour=i, dash=i, shape=i)


def _slo_name(name: str) -> str:
    return {"gap": "worst gap", "slo_attainment": "all SLOs"}.get(
        name, name.upper() if len(name) <= 4 else name
    )


def _goodput(run: ReportRun) -> float | None:
    return number(run.result, "request_goodput")


def _completed(run: ReportRun) -> float | None:
    return number(run.result, "request_throughput")
