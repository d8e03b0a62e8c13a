"""What every chart shares: axes, grid, legend, reference lines, and the room they need.

1. A chart says its axes, the values it will draw and its legend; `make_frame` gives each its room and scale.
2. The chart draws its data with `frame.x` and `frame.y`.
3. `axes`, `legend` and the reference lines go around it; the classes are those of `style.CSS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.load.report.scales import LinearScale, LogScale, Scale, extent, tick_label
from bench.load.report.svg import Markup, join, line, marker, path, rect, text

WIDTH, HEIGHT, WIDE = 560.0, 310.0, 1160.0
CHAR_PX = 6.3  # a mean character of the 11.5 px labels
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 18.0, 26.0, 40.0
_LEGEND_ROW, _KEY = 18.0, 30.0
NUM_COLOURS, NUM_DASHES = 6, 6


@dataclass(frozen=True, slots=True)
class Axis:
    """`title` names quantity and unit. `lo`/`hi`: what the axis reaches even if the data does not."""

    title: str
    is_log: bool = False
    lo: float | None = None
    hi: float | None = None
    is_tight: bool = False  # ends where the data ends, not at a round number
    is_whole: bool = False  # counts something: no ticks between whole numbers

    def scale(self, values: Iterable[float], start_px: float, end_px: float, num_ticks: int) -> Scale:
        """Covers all finite `values`; a log axis without a positive value becomes a linear one."""
        numbers = list(values)
        fixed = [end for end in (self.lo, self.hi) if end is not None]
        if self.is_log and (span := extent([v for v in numbers + fixed if v > 0])):
            return LogScale.nice(*span, start_px, end_px)
        lo, hi = extent(numbers + fixed) or (0.0, 1.0)
        is_fixed = self.lo is not None and self.hi is not None and lo == self.lo and self.hi == hi
        if (is_fixed or self.is_tight) and lo < hi:
            return LinearScale(lo, hi, start_px, end_px, self.is_whole)
        return LinearScale.nice(lo, hi, start_px, end_px, num_ticks)


@dataclass(frozen=True, slots=True)
class Key:
    """One legend entry: a line with dash and marker, or a filled patch (`dash` None)."""

    name: str
    colour: int | str  # number of the palette, or a class of its own
    dash: int | None = None
    shape: int | None = None
    is_ring: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled reference line at a value, or a band from `at` to `to`."""

    at: float
    label: str
    to: float | None = None
    css: str = "ref"


@dataclass(frozen=True, slots=True)
class Frame:
    width: float
    height: float
    x: Scale
    y: Scale
    left: float
    right: float
    top: float
    bottom: float
    keys: tuple[tuple[Key, float, float], ...]  # with their places

    def axes(self, x_title: str, y_title: str | None, num_x: int = 7, num_y: int = 5) -> Markup:
        """Grid lines, tick labels and titles; without `y_title` the y axis stays bare."""
        parts: list[Markup] = []
        if y_title is not None:
            for tick in self.y.ticks(num_y):
                y = self.y(tick)
                parts.append(line(self.left, y, self.right, y, "grid"))
                parts.append(text(self.left - 8, y + 4, tick_label(tick), "tick", "end"))
            parts.append(text(self.left - 8, self.top - 11, y_title, "axis-title"))
        last_px = float("-inf")
        for tick in self.x.ticks(num_x):
            x, label = self.x(tick), tick_label(tick)
            parts.append(line(x, self.bottom, x, self.bottom + 4, "axis"))
            if x - last_px >= (len(label) + 1) * CHAR_PX:
                middle = min(x, self.width - len(label) * CHAR_PX / 2 - 1)
                parts.append(text(middle, self.bottom + 17, label, "tick", "middle"))
                last_px = x
        parts.append(line(self.left, self.bottom, self.right, self.bottom, "axis"))
        parts.append(text((self.left + self.right) / 2, self.bottom + 33, x_title, "axis-title", "middle"))
        return join(parts)

    def legend(self) -> Markup:
        parts: list[Markup] = []
        for key, x, y in self.keys:
            css = colour_css(key.colour)
            if key.dash is None and key.shape is None:
                parts.append(rect(x + 4, y - 8, 12, 9, f"fill {css}"))
            if key.dash is not None:
                parts.append(path([(x, y - 4), (x + 22, y - 4)], f"ln {css} d{key.dash % NUM_DASHES}"))
            if key.shape is not None:
                style = "hollow" if key.is_ring else "dot"
                parts.append(marker(key.shape, x + 11, y - 4, f"{style} {css}", 5 if key.is_ring else 3))
            parts.append(text(x + (20 if key.dash is None and key.shape is None else 27), y, key.name, "key"))
        return join(parts)

    def across(self, marks: Sequence[Mark]) -> Markup:
        """Horizontal reference lines; whoever draws them labels them in the right margin."""
        return join(line(self.left, self.y(m.at), self.right, self.y(m.at), m.css) for m in marks)

    def upright(self, marks: Sequence[Mark]) -> Markup:
        """Vertical reference lines and bands, to be drawn behind the data."""
        parts: list[Markup] = []
        for mark in marks:
            x = self.x(mark.at)
            if mark.to is not None:  # the scale keeps both ends inside the plot
                end = self.x(mark.to)
                if end > x:
                    parts.append(rect(x, self.top, end - x, self.bottom - self.top, "band"))
            else:
                parts.append(line(x, self.top, x, self.bottom, mark.css))
        return join(parts)

    def upright_labels(self, marks: Sequence[Mark], is_low: bool = False) -> Markup:
        """Lines: beside them, in rows from the top, or the bottom if `is_low`. Bands: above the plot."""
        parts: list[Markup] = []
        row = 0
        for mark in marks:
            if not mark.label:
                continue
            x = self.x(mark.at)
            if mark.to is not None:
                middle = (x + self.x(mark.to)) / 2
                parts.append(text(middle, self.top - 5, mark.label, "ref-label", "middle"))
                continue
            y = self.bottom - 8 - 15 * row if is_low else self.top + 12 + 15 * row
            is_left = x + 6 + len(mark.label) * CHAR_PX > self.right
            parts.append(
                text(x - 5 if is_left else x + 5, y, mark.label, "ref-label", "end" if is_left else "start")
            )
            row += 1
        return join(parts)


def make_frame(
    x_axis: Axis,
    y_axis: Axis,
    x_values: Iterable[float],
    y_values: Iterable[float],
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    keys: Sequence[Key] = (),
    end_labels: Sequence[str] = (),
    left: float | None = None,
    num_x: int = 7,
    num_y: int = 5,
) -> Frame:
    """Room for the legend above, for labels at line ends to the right, for axes left and below.

    `left` None: as wide as the longest label of the y axis needs, and no less than all charts have.
    """
    longest = max((len(label) for label in end_labels), default=0)
    right = width - (_RIGHT if not longest else min(longest * CHAR_PX + 14, width * 0.34))
    edge = _LEFT if left is None else left
    places, num_rows = _legend_places(keys, edge - 8, width - 8)
    top, bottom = _TOP + num_rows * _LEGEND_ROW, height - _BOTTOM
    y = y_axis.scale(y_values, bottom, top, num_y)
    if left is None:
        left = max(_LEFT, 12 + CHAR_PX * max((len(tick_label(tick)) for tick in y.ticks(num_y)), default=0))
    x = x_axis.scale(x_values, left, right, num_x)
    return Frame(width, height, x, y, left, right, top, bottom, tuple(places))


def height_around(keys: Sequence[Key], left: float, width: float) -> float:
    """What legend, titles and the x axis take of a chart's height."""
    return _TOP + _legend_places(keys, left - 8, width - 8)[1] * _LEGEND_ROW + _BOTTOM


def _legend_places(
    keys: Sequence[Key], left: float, right: float
) -> tuple[list[tuple[Key, float, float]], int]:
    places: list[tuple[Key, float, float]] = []
    x, row = left, 0
    for key in keys:
        width = _KEY + len(key.name) * CHAR_PX + 14
        if x + width > right and x > left:
            x, row = left, row + 1
        places.append((key, x, 12 + row * _LEGEND_ROW))
        x += width
    return places, row + 1 if keys else 0


def colour_css(colour: int | str) -> str:
    return f"c{colour % NUM_COLOURS}" if isinstance(colour, int) else colour


def shorten(name: str, limit: int = 26) -> str:
    """A name cut in its middle, where model paths differ least."""
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[-(limit - 1 - head) :]}"
