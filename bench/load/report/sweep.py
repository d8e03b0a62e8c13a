"""Runs ordered as sweeps: points of one target at several loads, repeated over seeds.

1. Runs of one target are one sweep; their load is the nominal rate, or the requests in flight.
2. `curve` turns a figure of the result files into a line through the means per load, the points measured,
   and the spread between seeds. A point stands at the rate really offered, if its result says, and its
   tooltip tells the nominal one; a mean stands at the mean of those. Loads that were measured with different
   seeds, as the probes of a search are, are points without a line: it would show the seeds' differences.
3. `knee` names the highest load that still meets the SLOs, if there are two loads or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.load.report.frame import Axis
from bench.load.report.scales import aligned, quantity
from bench.load.report.values import (
    Load,
    ReportRun,
    Table,
    attainment,
    doubt,
    number,
    offered_load,
    realised_rate,
)
from bench.load.report.xy import Dot, Series

Reading = Callable[[ReportRun], float | None]


@dataclass(frozen=True, slots=True)
class Sweep:
    target: str
    points: Sequence[tuple[float, ReportRun]]  # by nominal load, ascending
    load: Load

    def loads(self) -> list[float]:
        return sorted({load for load, _ in self.points})

    def place(self, load: float, run: ReportRun) -> float:
        """Where a run stands on the x axis."""
        realised = realised_rate(run.result) if self.load is Load.RATE else None
        return load if realised is None else realised

    def mean_place(self, load: float) -> float:
        return fmean(self.place(at, run) for at, run in self.points if at == load)

    @property
    def is_joined(self) -> bool:
        """Whether every load was measured with the same seeds."""
        seeds: dict[float, set[float | None]] = {}
        for load, run in self.points:
            seeds.setdefault(load, set()).add(number(run.result, "arrival", "seed"))
        return all(some == next(iter(seeds.values())) for some in seeds.values())


def sweeps(runs: Sequence[ReportRun], load: Load) -> list[Sweep]:
    """In order of first appearance; runs without this kind of load are left out."""
    groups: dict[str, list[tuple[float, ReportRun]]] = {}
    for run in runs:
        value = offered_load(run.result, load)
        if value is not None:
            groups.setdefault(run.target, []).append((value, run))
    return [Sweep(target, sorted(points, key=lambda p: p[0]), load) for target, points in groups.items()]


def num_loads(groups: Sequence[Sweep]) -> int:
    """Of the target with the most."""
    return max((len(sweep.loads()) for sweep in groups), default=0)


def measured(sweep: Sweep, reading: Reading) -> list[tuple[float, float, ReportRun]]:
    return [(load, value, run) for load, run in sweep.points if (value := reading(run)) is not None]


def means(points: Sequence[tuple[float, float, ReportRun]]) -> list[tuple[float, float, float, float]]:
    """(load, mean, least, greatest) per load."""
    loads = sorted({load for load, _, _ in points})
    values = {load: [value for at, value, _ in points if at == load] for load in loads}
    return [(load, fmean(values[load]), min(values[load]), max(values[load])) for load in loads]


def curve(
    sweep: Sweep,
    reading: Reading,
    name: str,
    load: Load,
    unit: str,
    *,
    colour: int | str,
    dash: int,
    shape: int,
) -> Series | None:
    """None where no run has the figure."""
    points = measured(sweep, reading)
    if not points:
        return None
    lines = means(points)
    has_spread = any(lo < hi for _, _, lo, hi in lines)
    return Series(
        name=name,
        line=[(sweep.mean_place(at), mean) for at, mean, _, _ in lines],
        dots=[
            Dot(sweep.place(at, run), value, _tip(name, at, value, run, load, unit))
            for at, value, run in points
        ],
        band=[(sweep.mean_place(at), lo, hi) for at, _, lo, hi in lines] if has_spread else (),
        colour=colour,
        dash=dash,
        shape=shape,
        is_joined=sweep.is_joined,
    )


def _tip(name: str, at: float, value: float, run: ReportRun, load: Load, unit: str) -> str:
    where = f"{quantity(at)} req/s" if load is Load.RATE else f"{quantity(at)} in flight"
    realised = realised_rate(run.result) if load is Load.RATE else None
    where += "" if realised is None else f" nominal, {quantity(realised)} offered"
    seed = number(run.result, "arrival", "seed")
    word = doubt(run)
    notes = ("" if seed is None else f", seed {seed:.0f}") + ("" if word is None else f", {word} run")
    return f"{name}: {quantity(value, unit)} at {where}{notes}"


def knee(sweep: Sweep, share: float) -> float | None:
    """The highest load up to which every load measured had a mean attainment of at least `share`; one load
    alone has no knee, and a run that is invalid or incomplete has no part in it."""
    believed = replace(sweep, points=[(at, run) for at, run in sweep.points if doubt(run) is None])
    if len(believed.loads()) < 2:
        return None
    best: float | None = None
    for load, mean, _, _ in means(measured(believed, lambda run: attainment(run.result))):
        if mean < share - 1e-9:
            break
        best = load
    return best


def over(load: Load) -> str:
    """The end of a chart's title."""
    return "against offered rate" if load is Load.RATE else "against requests in flight"


def unjoined_note(groups: Sequence[Sweep]) -> str:
    """The end of a chart's note, where points are not joined."""
    return "" if all(sweep.is_joined for sweep in groups) else " No line: the seeds differ from rate to rate."


def load_axis(load: Load) -> Axis:
    return Axis(load.value, lo=0.0)


def means_table(series: Sequence[Series], load: Load, unit: str) -> Table:
    """One row per place on the x axis, one column per line: the means over seeds."""
    loads = sorted({x for one in series for x, _ in one.line})
    columns = [aligned([dict(one.line).get(at) for at in loads]) for one in series]
    rows = [[quantity(at), *cells] for at, *cells in zip(loads, *columns, strict=True)]
    return Table([load.value, *(f"{one.name} ({unit})" for one in series)], rows)
