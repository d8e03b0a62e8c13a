"""Charts of points: lines, scatters and both, with reference lines and labels at the line ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.report.frame import (
    HEIGHT,
    NUM_DASHES,
    WIDTH,
    Axis,
    Frame,
    Key,
    Mark,
    colour_css,
    make_frame,
    shorten,
)
from bench.load.report.svg import Markup, area, join, marker, path, point, svg, text

_LABEL_ROW = 14.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured point; `tip` is what its tooltip says."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, slots=True)
class Series:
    """`line` runs through its points in their order; `dots` are drawn on top and can be focused.

    `band` is (x, low, high): the spread around the line. `dash` and `shape` tell series apart without colour.
    """

    name: str
    line: Sequence[tuple[float, float]] = ()
    dots: Sequence[Dot] = ()
    band: Sequence[tuple[float, float, float]] = ()
    colour: int | str = 0
    dash: int = 0
    shape: int = 0

    def xs(self) -> list[float]:
        return [x for x, _ in self.line] + [dot.x for dot in self.dots] + [x for x, _, _ in self.band]

    def ys(self) -> list[float]:
        ends = [end for _, lo, hi in self.band for end in (lo, hi)]
        return [y for _, y in self.line] + [dot.y for dot in self.dots] + ends


def xy_chart(
    label: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    across: Sequence[Mark] = (),
    upright: Sequence[Mark] = (),
    label_ends: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Markup:
    """`label_ends` writes each line's name at its right end instead of a legend.

    Points that are not finite are left out; reference lines widen the axes as data does.
    """
    series = [_finite(one) for one in series]
    names = [shorten(one.name) for one in series]
    is_single = len(series) == 1
    keys = [
        Key(
            shorten(one.name, 34), one.colour, one.dash if one.line else None, one.shape if one.dots else None
        )
        for one in series
    ]
    frame = make_frame(
        x_axis,
        y_axis,
        [x for one in series for x in one.xs()] + [m.at for m in upright],
        [y for one in series for y in one.ys()] + [m.at for m in across],
        width=width,
        height=height,
        keys=[] if label_ends or is_single else keys,
        end_labels=names if label_ends and not is_single else (),
    )
    parts = [frame.axes(x_axis.title, y_axis.title), frame.upright(upright), frame.across(across)]
    parts += [_band(frame, one) for one in series]
    parts += [_line(frame, one) for one in series]
    parts += [_dots(frame, one) for one in series]
    if label_ends and not is_single:
        parts.append(_end_labels(frame, series, names))
    parts.append(frame.legend())
    return svg(width, height, label, *parts)


def _finite(series: Series) -> Series:
    def is_finite(*values: float) -> bool:
        return all(math.isfinite(value) for value in values)

    return Series(
        name=series.name,
        line=[p for p in series.line if is_finite(*p)],
        dots=[dot for dot in series.dots if is_finite(dot.x, dot.y)],
        band=[b for b in series.band if is_finite(*b)],
        colour=series.colour,
        dash=series.dash,
        shape=series.shape,
    )


def _line(frame: Frame, series: Series) -> Markup:
    css = f"ln {colour_css(series.colour)} d{series.dash % NUM_DASHES}"
    return path([(frame.x(x), frame.y(y)) for x, y in series.line], css)


def _band(frame: Frame, series: Series) -> Markup:
    upper = [(frame.x(x), frame.y(hi)) for x, _, hi in series.band]
    lower = [(frame.x(x), frame.y(lo)) for x, lo, _ in series.band]
    return area(upper, lower, f"spread {colour_css(series.colour)}")


def _dots(frame: Frame, series: Series) -> Markup:
    css = f"dot {colour_css(series.colour)}"
    return join(
        point(dot.tip, marker(series.shape, frame.x(dot.x), frame.y(dot.y), css)) for dot in series.dots
    )


def _end_labels(frame: Frame, series: Sequence[Series], names: Sequence[str]) -> Markup:
    """Names beside the last points, moved apart so that none covers another."""
    ends: list[tuple[float, float, int]] = []
    for i, one in enumerate(series):
        last = one.line[-1] if one.line else (one.dots[-1].x, one.dots[-1].y) if one.dots else None
        if last is not None:
            ends.append((frame.y(last[1]), frame.x(last[0]), i))
    ends.sort()
    parts: list[Markup] = []
    for place, (_, x, i) in zip(spread([y for y, _, _ in ends], frame.top, frame.bottom), ends, strict=True):
        css = f"end {colour_css(series[i].colour)}"
        parts.append(text(min(x, frame.right) + 9, place + 4, names[i], css))
    return join(parts)


def spread(places: Sequence[float], top: float, bottom: float, row: float = _LABEL_ROW) -> list[float]:
    """Sorted positions moved as little as needed to be `row` apart, inside [top, bottom] while they fit."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + row) if moved else max(place, top))
    limit = bottom
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - row
    return moved
