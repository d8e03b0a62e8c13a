"""Charts over intervals: histograms, and quantities that hold for a while (steps, stacked)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.report.frame import (
    HEIGHT,
    WIDTH,
    Axis,
    Frame,
    Key,
    Mark,
    colour_css,
    make_frame,
)
from bench.load.report.scales import nice_step
from bench.load.report.svg import Markup, area, path, point, rect, svg


@dataclass(frozen=True, slots=True)
class Bin:
    """lo <= value < hi; the last one includes hi."""

    lo: float
    hi: float
    count: int


def make_bins(values: Sequence[float], num: int = 30) -> list[Bin]:
    """At most `num` + 1 bins of one nice width (whole numbers for whole values); [] without values."""
    if not values:
        return []
    lo, hi = min(values), max(values)
    width = nice_step(max(hi - lo, 1.0), num)
    if all(value == int(value) for value in values):
        width = max(width, 1.0)
    first = int(lo // width)
    counts = [0] * (int(hi // width) - first + 1)
    for value in values:
        counts[int(value // width) - first] += 1
    return [Bin((first + i) * width, (first + i + 1) * width, count) for i, count in enumerate(counts)]


def histogram(
    label: str,
    bins: Sequence[Bin],
    x_axis: Axis,
    y_axis: Axis,
    tips: Sequence[str],
    *,
    colour: int = 0,
    upright: Sequence[Mark] = (),
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Markup:
    """One bar per bin, a hair apart; `tips` are its tooltips."""
    edges = [end for one in bins for end in (one.lo, one.hi)]
    frame = make_frame(x_axis, y_axis, edges, [one.count for one in bins], width=width, height=height)
    parts = [frame.axes(x_axis.title, y_axis.title)]
    for one, tip in zip(bins, tips, strict=True):
        if one.count:
            x, top = frame.x(one.lo), frame.y(one.count)
            bar_px = max(frame.x(one.hi) - x - 1, 1.0)
            bar = rect(x + 0.5, top, bar_px, frame.bottom - top, f"bar {colour_css(colour)}")
            parts.append(point(tip, bar))
    parts.append(frame.upright(upright))
    return svg(width, height, label, *parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """`values[i]` holds from `edges[i]` to `edges[i + 1]` of the chart."""

    name: str
    values: Sequence[float]
    colour: int


def stacked_steps(
    label: str,
    edges: Sequence[float],
    layers: Sequence[Layer],
    x_axis: Axis,
    y_axis: Axis,
    tips: Sequence[str],
    *,
    upright: Sequence[Mark] = (),
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Markup:
    """Layers upon one another from the x axis up; an invisible column per interval carries its tip."""
    totals = [sum(layer.values[i] for layer in layers) for i in range(len(edges) - 1)]
    keys = [Key(layer.name, layer.colour) for layer in layers] if len(layers) > 1 else []
    frame = make_frame(x_axis, y_axis, edges, totals, width=width, height=height, keys=keys)
    parts = [frame.axes(x_axis.title, y_axis.title)]
    below = [0.0] * len(totals)
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        upper, css = _steps(frame, edges, above), colour_css(layer.colour)
        parts.append(area(upper, _steps(frame, edges, below), f"layer {css}"))
        parts.append(path(upper, f"ln thin {css}"))
        below = above
    parts.append(frame.upright(upright))
    for i, tip in enumerate(tips):
        x = frame.x(edges[i])
        column = rect(x, frame.top, frame.x(edges[i + 1]) - x, frame.bottom - frame.top, "hit")
        parts.append(point(tip, column))
    parts.append(frame.legend())
    return svg(width, height, label, *parts)


def _steps(frame: Frame, edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    corners: list[tuple[float, float]] = []
    for i, value in enumerate(values):
        y = frame.y(value)
        corners += [(frame.x(edges[i]), y), (frame.x(edges[i + 1]), y)]
    return corners
