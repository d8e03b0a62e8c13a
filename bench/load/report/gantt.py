"""The timeline chart: one row per request, segments of what it was doing, marks of what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bench.load.report.frame import WIDE, Axis, Key, Mark, height_around, make_frame
from bench.load.report.svg import Markup, line, marker, point, rect, svg

_LEFT = 16.0


class Phase(Enum):
    """What a request was doing; the value is the class of its colour."""

    LAG = "p-lag"  # due, but the client had not sent it
    WAIT = "p-wait"  # sent, no token yet, and the server does not say why
    QUEUE = "p-queue"
    PREFILL = "p-prefill"
    TRANSFER = "p-transfer"
    DECODE = "p-decode"
    STREAM = "p-stream"  # tokens arriving, and the server does not say more


PHASE_NAMES = {
    Phase.LAG: "late sending",
    Phase.WAIT: "waiting for the first token",
    Phase.QUEUE: "queue",
    Phase.PREFILL: "prefill",
    Phase.TRANSFER: "KV transfer",
    Phase.DECODE: "decode",
    Phase.STREAM: "streaming",
}


@dataclass(frozen=True, slots=True)
class Segment:
    start: float
    end: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class Row:
    tip: str
    segments: tuple[Segment, ...]
    first_token: float | None = None
    failed_at: float | None = None  # where its cross goes


def row_height_px(num_rows: int) -> float:
    """Rows of 14 px while they are few, down to 4 px."""
    return min(14.0, max(4.0, 560.0 / max(num_rows, 1)))


def gantt(
    label: str, rows: Sequence[Row], x_axis: Axis, *, upright: Sequence[Mark] = (), width: float = WIDE
) -> Markup:
    """Rows from the top in the order given; the legend names only what occurs."""
    present = {segment.phase for row in rows for segment in row.segments}
    keys = [Key(name, phase.value) for phase, name in PHASE_NAMES.items() if phase in present]
    if any(row.first_token is not None for row in rows):
        keys.append(Key("first token", "p-first"))
    if any(row.failed_at is not None for row in rows):
        keys.append(Key("failed", "p-failed", shape=5))
    pitch = row_height_px(len(rows))
    height = pitch * len(rows) + height_around(keys, _LEFT, width)
    moments = [moment for row in rows for s in row.segments for moment in (s.start, s.end)]
    moments += [row.failed_at for row in rows if row.failed_at is not None]
    frame = make_frame(
        x_axis,
        Axis("", lo=0.0, hi=float(len(rows))),
        moments,
        [],
        width=width,
        height=height,
        keys=keys,
        left=_LEFT,
    )
    top = frame.bottom - pitch * len(rows)
    bar_px = max(pitch * 0.72, 2.5)
    parts = [frame.axes(x_axis.title, None, num_x=12), frame.upright(upright)]
    for i, row in enumerate(rows):
        y = top + pitch * i + (pitch - bar_px) / 2
        shapes: list[Markup] = []
        for segment in row.segments:
            x = frame.x(segment.start)
            shapes.append(
                rect(x, y, max(frame.x(segment.end) - x, 0.6), bar_px, f"fill {segment.phase.value}")
            )
        if row.first_token is not None:
            x = frame.x(row.first_token)
            shapes.append(line(x, y - 0.5, x, y + bar_px + 0.5, "ln p-first"))
        if row.failed_at is not None:
            cross = min(4.0, max(2.5, bar_px * 0.6))
            shapes.append(marker(5, frame.x(row.failed_at), y + bar_px / 2, "dot p-failed", cross))
        parts.append(point(row.tip, *shapes))
    parts.append(frame.legend())
    return svg(width, height, label, *parts)
