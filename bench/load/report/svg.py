"""Text of SVG and HTML, safely: every name and value is escaped here and nowhere else.

Functions return `Markup`, a string known to be markup; a plain `str` as a child is text and gets escaped.
Coordinates are rounded to a tenth of a pixel, so equal data gives equal bytes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping

AttributeValue = str | float | int | None
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


class Markup(str):
    """A string that is markup already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Text fit for element content and quoted attributes; characters XML forbids become U+FFFD."""
    return Markup(html.escape(_NOT_XML.sub("\ufffd", text), quote=True))


def px(value: float) -> str:
    """A coordinate: one decimal, none where it is whole, and no minus zero."""
    rounded = round(value, 1) + 0.0
    return str(int(rounded)) if rounded == int(rounded) else f"{rounded:.1f}"


def join(parts: Iterable[str]) -> Markup:
    """Children in order; plain strings are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def tag(name: str, attributes: Mapping[str, AttributeValue] | None = None, *children: str) -> Markup:
    """`<name key="value">children</name>`; attributes that are None are left out, numbers are pixels."""
    written = "".join(
        f' {key}="{px(value) if isinstance(value, int | float) else escape(value)}"'
        for key, value in (attributes or {}).items()
        if value is not None
    )
    if not children and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


_VOID = frozenset({"line", "path", "rect", "circle", "polygon", "use", "meta", "br", "hr"})


def svg(width: float, height: float, label: str, *children: str, focusable: bool = True) -> Markup:
    """One chart. Its points can be focused, so it is a named group of images rather than one image, whose
    contents assistive technology would not see; `focusable=False` makes it one image."""
    return tag(
        "svg",
        {
            "viewBox": f"0 0 {px(width)} {px(height)}",
            "role": "group" if focusable else "img",
            "aria-label": label,
            "class": "chart",
        },
        *children,
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return tag("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": css})


def rect(x: float, y: float, width: float, height: float, css: str) -> Markup:
    return tag("rect", {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0), "class": css})


def text(x: float, y: float, content: str, css: str, anchor: str = "start") -> Markup:
    return tag("text", {"x": x, "y": y, "class": css, "text-anchor": anchor}, content)


def path(points: Iterable[tuple[float, float]], css: str) -> Markup:
    """A polyline; empty where there are no points."""
    steps = " ".join(f"{'L' if i else 'M'}{px(x)} {px(y)}" for i, (x, y) in enumerate(points))
    return tag("path", {"d": steps, "class": css}) if steps else Markup("")


def area(upper: list[tuple[float, float]], lower: list[tuple[float, float]], css: str) -> Markup:
    """The surface between two polylines over the same x."""
    steps = " ".join(f"{'L' if i else 'M'}{px(x)} {px(y)}" for i, (x, y) in enumerate(upper + lower[::-1]))
    return tag("path", {"d": steps + " Z", "class": css}) if steps else Markup("")


def point(tip: str, *shapes: str) -> Markup:
    """A data point that can be focused and that tells itself: `tip` is tooltip and accessible name."""
    attributes: dict[str, AttributeValue] = {"class": "pt", "tabindex": "0", "role": "img", "aria-label": tip}
    return tag("g", attributes, tag("title", None, tip), *shapes)


def marker(shape: int, x: float, y: float, css: str, size: float = 3.5) -> Markup:
    """Shapes told apart without colour: disc, square, triangle, diamond, downward triangle, cross."""
    match shape % 6:
        case 0:
            return tag("circle", {"cx": x, "cy": y, "r": size, "class": css})
        case 1:
            return rect(x - size, y - size, 2 * size, 2 * size, css)
        case 2:
            corners = [(x, y - 1.3 * size), (x + 1.2 * size, y + size), (x - 1.2 * size, y + size)]
        case 3:
            corners = [(x, y - 1.4 * size), (x + 1.4 * size, y), (x, y + 1.4 * size), (x - 1.4 * size, y)]
        case 4:
            corners = [(x, y + 1.3 * size), (x + 1.2 * size, y - size), (x - 1.2 * size, y - size)]
        case _:
            a, b = size * 0.35, size * 1.1  # half a stroke's width, and the reach of a tip from the centre
            half = [
                (-b - a, -b + a),
                (-b + a, -b - a),
                (0.0, -2 * a),
                (b - a, -b - a),
                (b + a, -b + a),
                (2 * a, 0.0),
            ]
            corners = [(x + cx, y + cy) for cx, cy in half] + [(x - cx, y - cy) for cx, cy in half]
    return tag("polygon", {"points": " ".join(f"{px(cx)},{px(cy)}" for cx, cy in corners), "class": css})
