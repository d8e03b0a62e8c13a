"""Charts of points: lines, scatters and both, with reference lines and labels at the line ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """`line` runs through its points in their order, unless they are not `is_joined`; `dots` are drawn on top
    and can be focused.

    `band` is (x, low, high): the spread around the line. `dash` and `shape` tell series apart without colour.
    """

    name: str
    line: Sequence[tuple[float, float]] = ()
    dots: Sequence[Dot] = ()
    band: Sequence[tuple[float, float, float]] = ()
    colour: int | str = 0
    dash: int = 0
    shape: int = 0
    is_ring: bool = False  # dots are rings around those of other series
    is_joined: bool = True  # False: the points of `line` count in the axes and are not drawn

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
    is_label_low: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Markup:
    """`label_ends` writes each line's name at its right end instead of a legend.

    Points that are not finite are left out. Reference lines widen the axes as data does; upright ones are
    labelled at the top, or at the bottom with `is_label_low`.
    """
    series = [_finite(one) for one in series]
    names = [shorten(one.name) for one in series]
    is_single = len(series) == 1
    is_labelled = label_ends and not is_single
    keys = [
        Key(
            shorten(one.name, 34),
            one.colour,
            one.dash if one.line and one.is_joined else None,
            one.shape if one.dots else None,
            one.is_ring,
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
        keys=[] if is_labelled or is_single else keys,
        end_labels=[*(names if is_labelled else ()), *(mark.label for mark in across)],
    )
    parts = [frame.axes(x_axis.title, y_axis.title), frame.upright(upright), frame.across(across)]
    parts += [_band(frame, one) for one in series if one.is_joined]
    parts += [_line(frame, one) for one in series if one.is_joined]
    parts += [_dots(frame, one) for one in series]
    ends = _line_ends(frame, series, names) if is_labelled else []
    ends += [(frame.y(mark.at), frame.right - 3, mark.label, "ref-label") for mark in across]
    parts += [_end_labels(frame, ends), frame.upright_labels(upright, is_label_low), frame.legend()]
    return svg(width, height, label, *parts)


def _finite(series: Series) -> Series:
    def is_finite(*values: float) -> bool:
        return all(math.isfinite(value) for value in values)

    return replace(
        series,
        line=[p for p in series.line if is_finite(*p)],
        dots=[dot for dot in series.dots if is_finite(dot.x, dot.y)],
        band=[b for b in series.band if is_finite(*b)],
    )


def _line(frame: Frame, series: Series) -> Markup:
    css = f"ln {colour_css(series.colour)} d{series.dash % NUM_DASHES}"
    return path([(frame.x(x), frame.y(y)) for x, y in series.line], css)


def _band(frame: Frame, series: Series) -> Markup:
    upper = [(frame.x(x), frame.y(hi)) for x, _, hi in series.band]
    lower = [(frame.x(x), frame.y(lo)) for x, lo, _ in series.band]
    return area(upper, lower, f"spread {colour_css(series.colour)}")


def _dots(frame: Frame, series: Series) -> Markup:
    css = f"{'hollow' if series.is_ring else 'dot'} {colour_css(series.colour)}"
    size = 7.0 if series.is_ring else 3.5
    return join(
        point(dot.tip, marker(series.shape, frame.x(dot.x), frame.y(dot.y), css, size)) for dot in series.dots
    )


End = tuple[float, float, str, str]  # y and x of what is labelled, label, class


def _line_ends(frame: Frame, series: Sequence[Series], names: Sequence[str]) -> list[End]:
    ends: list[End] = []
    for one, name in zip(series, names, strict=True):
        last = one.line[-1] if one.line else (one.dots[-1].x, one.dots[-1].y) if one.dots else None
        if last is not None:
            ends.append((frame.y(last[1]), frame.x(last[0]), name, f"end {colour_css(one.colour)}"))
    return ends


def _end_labels(frame: Frame, ends: Sequence[End]) -> Markup:
    """Labels right of what they name, moved apart so that none covers another."""
    ordered = sorted(ends)
    places = spread([y for y, _, _, _ in ordered], frame.top, frame.bottom)
    return join(
        text(x + 9, place + 4, label, css) for place, (_, x, label, css) in zip(places, ordered, strict=True)
    )


def spread(places: Sequence[float], top: float, bottom: float, row: float = _LABEL_ROW) -> list[float]:
    """Ascending positions moved apart to be at least `row` from one another, in [top, bottom] while they fit.

    Positions too close become a block around their mean, so the least squared movement.
    """
    blocks: list[tuple[float, int]] = []  # first position, how many
    for place in places:
        start, num = place, 1
        while blocks and blocks[-1][0] + blocks[-1][1] * row > start:
            above, num_above = blocks.pop()
            start = (above * num_above + (start - num_above * row) * num) / (num_above + num)
            num += num_above
        blocks.append((start, num))
    moved = [start + i * row for start, num in blocks for i in range(num)]
    limit = bottom
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - row
    limit = top
    for i in range(len(moved)):
        moved[i] = max(moved[i], limit)
        limit = moved[i] + row
    return moved
