"""The page's parts that are words and tables: banner, tiles, tables, figures with their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.load.report.svg import Markup, join, tag
from bench.load.report.values import Block, Figure, Omitted, Table


def element(name: str, css: str, *children: str) -> Markup:
    return tag(name, {"class": css}, *children)


def table(content: Table, css: str | None = None) -> Markup:
    """Scrolls sideways by itself where the page is too narrow."""
    head = tag("tr", None, *(tag("th", {"scope": "col"}, header) for header in content.headers))
    rows = [tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in content.rows]
    body = tag("table", {"class": css}, tag("thead", None, head), tag("tbody", None, *rows))
    return scrolling(body)


def scrolling(content: Markup) -> Markup:
    return tag("div", {"class": "scroll"}, content)


def fold(title: str, *children: str, is_open: bool = False, css: str | None = None) -> Markup:
    return tag(
        "details", {"open": "" if is_open else None, "class": css}, tag("summary", None, title), *children
    )


def figure(content: Figure) -> Markup:
    mark = doubt_mark(content.doubt)
    caption = tag("figcaption", None, tag("b", None, content.title), mark, tag("span", None, content.note))
    data = fold("Data", table(content.table)) if content.table is not None else Markup("")
    css = "wide" if content.is_wide else None
    return tag("figure", {"class": css}, caption, scrolling(content.chart), data)


def doubt_mark(words: str | None) -> Markup:
    """Stands beside what is drawn from, or told of, a run that is not to be believed."""
    return Markup("") if words is None else element("em", "doubt", words)


def charts(blocks: Sequence[Block], doubt: str | None = None) -> Markup:
    """Drawn charts as a grid, then what was left out and why. `doubt`: the mark that each chart bears."""
    drawn = [figure(replace(block, doubt=doubt)) for block in blocks if isinstance(block, Figure)]
    left_out = [block for block in blocks if isinstance(block, Omitted)]
    parts = [element("div", "grid-of-charts", *drawn)] if drawn else []
    if left_out:
        items = [tag("li", None, f"{block.title}: left out, {block.reason}.") for block in left_out]
        parts.append(element("ul", "omitted", *items))
    return join(parts)


def section(anchor: str, title: str, *children: str) -> Markup:
    return tag("section", {"id": anchor}, tag("h2", None, title), *children)


def tile(name: str, value: str, sub: str) -> Markup:
    words = [element("span", "value", value), element("span", "sub", sub)]
    return element("div", "tile", tag("dt", None, name), tag("dd", None, *words))


def tiles(items: Sequence[tuple[str, str, str]]) -> Markup:
    """(name, value, what stands below it)."""
    return element("dl", "tiles", *(tile(*item) for item in items)) if items else Markup("")
