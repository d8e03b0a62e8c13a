"""One run over time: tokens per second, and requests running and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bench.load.figures.activity import Activity
from bench.load.report.bars import Layer, stacked_steps
from bench.load.report.frame import Axis, Mark
from bench.load.report.scales import duration, nice_step, quantity
from bench.load.report.values import Block, Figure, Omitted, ReportRun, Table

MAX_SLICES = 120
MIN_SLICE_S = 0.05
_MAX_TABLE_ROWS = 60
_TIME = Axis("seconds since the run's start", lo=0.0, is_tight=True)


def activity_charts(run: ReportRun, window: Sequence[Mark]) -> list[Block]:
    """Tokens per second, and requests running and waiting; `window` marks what was measured."""
    titles = ("Output tokens per second", "Requests running and waiting")
    if run.records is None:
        return [Omitted(title, "no per-request records at hand") for title in titles]
    sent = [record for record in run.records.records if record.sent_s is not None]
    end_s = max((record.end_s or 0.0 for record in sent), default=0.0)
    if end_s <= 0:
        return [Omitted(title, "no request was sent") for title in titles]
    width_s = max(nice_step(end_s, MAX_SLICES), MIN_SLICE_S)
    edges_s = width_s * np.arange(int(np.ceil(end_s / width_s - 1e-9)) + 1, dtype=np.float64)
    activity = Activity.of(run.records.records, run.records.wall_s)
    counts, _ = np.histogram(activity.token_times_s, bins=edges_s, weights=activity.tokens)
    rates = [float(rate) for rate in counts / width_s]
    running = [float(num) for num in activity.mean_running(edges_s)]
    waiting = [float(num) for num in activity.mean_waiting(edges_s)]
    edges = [float(edge) for edge in edges_s]
    spans = [f"{quantity(lo)}–{quantity(hi)} s" for lo, hi in pairwise(edges)]
    every = max(1, -(-len(spans) // _MAX_TABLE_ROWS))
    in_words = f"Means over slices of {duration(width_s)}"
    tokens = stacked_steps(
        titles[0],
        edges,
        [Layer("output tokens", rates, 0)],
        _TIME,
        Axis("tok/s", lo=0.0),
        [f"{span}: {quantity(rate)} tok/s" for span, rate in zip(spans, rates, strict=True)],
        upright=window,
    )
    loads = stacked_steps(
        titles[1],
        edges,
        [
            Layer("running (first token to last byte)", running, 2),
            Layer("waiting for the first token", waiting, 1),
        ],
        _TIME,
        Axis("requests", lo=0.0),
        [
            f"{span}: {quantity(r)} running, {quantity(w)} waiting"
            for span, r, w in zip(spans, running, waiting, strict=True)
        ],
        upright=window,
    )
    table = _thinned(spans, every, {"tok/s": rates})
    load_table = _thinned(spans, every, {"running": running, "waiting": waiting})
    return [
        Figure(titles[0], f"{in_words}, of all requests, by the moment a chunk arrived.", tokens, table),
        Figure(titles[1], f"{in_words}; waiting counts from the scheduled time.", loads, load_table),
    ]


def _thinned(spans: Sequence[str], every: int, columns: dict[str, list[float]]) -> Table:
    title = "slice" if every == 1 else f"slice (every {every}th)"
    rows = [[spans[i], *(quantity(c[i]) for c in columns.values())] for i in range(0, len(spans), every)]
    return Table([title, *columns], rows)
