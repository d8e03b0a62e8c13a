"""Runs ordered as sweeps: points of one target at several loads, repeated over seeds.

1. Runs with equal target names are one sweep; their load is the offered rate, or the requests in flight.
2. `curve` turns a figure of the result files into a line through the means per load, the points measured,
   and the spread between seeds.
3. `knee` names the highest load that still meets the SLOs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.load.report.scales import quantity
from bench.load.report.values import Load, ReportRun, attainment, is_valid, number, offered_load, target_name
from bench.load.report.xy import Dot, Series

Reading = Callable[[ReportRun], float | None]


@dataclass(frozen=True, slots=True)
class Sweep:
    target: str
    points: Sequence[tuple[float, ReportRun]]  # by load, ascending

    def loads(self) -> list[float]:
        return sorted({load for load, _ in self.points})


def sweeps(runs: Sequence[ReportRun], load: Load) -> list[Sweep]:
    """In order of first appearance; runs without this kind of load are left out."""
    groups: dict[str, list[tuple[float, ReportRun]]] = {}
    for run in runs:
        value = offered_load(run.result, load)
        if value is not None:
            groups.setdefault(target_name(run.result), []).append((value, run))
    return [Sweep(target, sorted(points, key=lambda p: p[0])) for target, points in groups.items()]


def num_loads(groups: Sequence[Sweep]) -> int:
    return len({load for sweep in groups for load in sweep.loads()})


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
        line=[(at, mean) for at, mean, _, _ in lines],
        dots=[Dot(at, value, _tip(name, at, value, run, load, unit)) for at, value, run in points],
        band=[(at, lo, hi) for at, _, lo, hi in lines] if has_spread else (),
        colour=colour,
        dash=dash,
        shape=shape,
    )


def _tip(name: str, at: float, value: float, run: ReportRun, load: Load, unit: str) -> str:
    where = f"{quantity(at)} req/s" if load is Load.RATE else f"{quantity(at)} in flight"
    seed = number(run.result, "arrival", "seed")
    notes = ("" if seed is None else f", seed {seed:.0f}") + ("" if is_valid(run.result) else ", INVALID run")
    return f"{name}: {quantity(value, unit)} at {where}{notes}"


def knee(sweep: Sweep, share: float) -> float | None:
    """The highest load up to which every load measured had a mean attainment of at least `share`."""
    best: float | None = None
    for load, mean, _, _ in means(measured(sweep, lambda run: attainment(run.result))):
        if mean < share - 1e-9:
            break
        best = load
    return best
