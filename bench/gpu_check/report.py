"""What a part found: lines of a table, and whether each holds. Values only; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Goal(msgspec.Struct, frozen=True):
    """A figure beside the one that is aimed at; told, not asserted. `found` and `wanted` are in `unit`."""

    what: str
    found: float
    wanted: float
    unit: str = ""
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


class Line(msgspec.Struct, frozen=True):
    """One thing looked at. `holds` None: nothing was asserted, the line informs."""

    name: str
    cells: dict[str, Any]
    holds: bool | None = None
    goals: tuple[Goal, ...] = ()


class Head(msgspec.Struct, frozen=True):
    """What the process of a part writes first; its lines follow, one JSON value each."""

    title: str
    note: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: how the part ended, if not well; `lines` are what it had found by then."""

    name: str
    title: str
    lines: tuple[Line, ...] = ()
    note: str = ""
    error: str | None = None
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.error is None and all(line.holds is not False for line in self.lines)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    interpreted: bool
    versions: dict[str, str]
    parts: tuple[Part, ...]

    @property
    def holds(self) -> bool:
        return all(part.holds for part in self.parts)


def render(report: Report) -> str:
    """The whole report as text."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    out = [f"Baton GPU check on {report.device}", versions]
    if report.interpreted:
        out.append(
            "In Triton's interpreter, on tiny shapes: this shows the flow. No rate here means anything."
        )
    for part in report.parts:
        out += ["", f"{part.title} ({part.seconds:.0f} s)"]
        if part.note:
            out.append(part.note)
        out += render_lines(part.lines)
        if part.error is not None:
            out.append(f"FAILED: {part.error}")
    out += render_goals([line for part in report.parts for line in part.lines])
    out += [
        "",
        "everything asserted holds" if report.holds else "SOMETHING ASSERTED DOES NOT HOLD: see above",
    ]
    return "\n".join(out)


def render_lines(lines: Sequence[Line]) -> list[str]:
    """As a table with a column for each cell that any line has."""
    if not lines:
        return []
    columns = list(dict.fromkeys(name for line in lines for name in line.cells))
    rows = [["", *columns, ""]]
    for line in lines:
        verdict = {True: "ok", False: "WRONG", None: ""}[line.holds]
        rows.append([line.name, *(_text(line.cells.get(name, "")) for name in columns), verdict])
    return _aligned(rows)


def render_goals(lines: Sequence[Line]) -> list[str]:
    """Every figure that something is aimed at for, beside its goal; nothing where there is none."""
    goals = [(line, goal) for line in lines for goal in line.goals]
    if not goals:
        return []
    rows = [["", "found", "aimed at", ""]]
    for line, goal in goals:
        found, wanted = (f"{_text(float(value))}{goal.unit}" for value in (goal.found, goal.wanted))
        bound = f"{'<=' if goal.at_most else '>='} {wanted}"
        rows.append([f"{line.name}: {goal.what}", found, bound, "met" if goal.is_met else "MISSED"])
    num_met = sum(goal.is_met for _, goal in goals)
    return ["", f"aimed at on an H100: {num_met} of {len(goals)} met", *_aligned(rows)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
