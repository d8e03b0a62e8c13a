"""Requests of a simulated run: the rows of a trace, in its order, at a rate of one's choice.

1. `read_trace` reads any of the known formats; times are sorted, empty rows left out, and both are told.
2. A seed chooses the first row; rows follow one another and begin again after the last (with block ids of
   their own: a second round finds nothing of the first in a prefix cache).
3. Arrivals are Poisson at the rate, or the trace's own rhythm, scaled to that mean rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.load.plans.trace_formats import TraceRow
from bench.load.plans.traces import Trace, read_trace
from bench.simulator.fleet.request import Request
from cluster.errors import ConfigError

HOLE_GAPS = 200  # mean gaps without an arrival: a hole
ROUND_IDS = 1 << 40


def read_rows(path: Path, format_name: str | None = None) -> tuple[Trace, list[str]]:
    """The trace, and a warning for each thing about it that a reader of the result should know.

    Raises:
        TraceError: see `read_trace`.
    """
    trace = read_trace(path, format_name)
    warnings = []
    if not trace.was_sorted:
        warnings.append(f"{path}: rows were not in order of time; they were sorted.")
    if trace.num_empty:
        warnings.append(f"{path}: {trace.num_empty:,} rows without input or output tokens were left out.")
    hole = _longest_hole(trace.rows)
    if hole is not None:
        warnings.append(
            f"{path}: nothing arrives for {hole[1]:,.0f} s after {hole[0]:,.0f} s (a hole?); "
            "Poisson arrivals ignore that, --arrivals trace replays it."
        )
    return trace, warnings


def _longest_hole(rows: Sequence[TraceRow]) -> tuple[float, float] | None:
    span_s = rows[-1].time_s
    if len(rows) < 100 or span_s <= 0:
        return None
    gaps = ((after.time_s - row.time_s, row.time_s) for row, after in pairwise(rows))
    longest_s, at_s = max(gaps)
    return (at_s, longest_s) if longest_s > HOLE_GAPS * span_s / len(rows) else None


def make_requests(
    rows: Sequence[TraceRow], rate: float, num_requests: int, seed: int, own_rhythm: bool = False
) -> list[Request]:
    """In order of arrival, the first at about 1 / rate.

    Raises:
        ConfigError: the trace's own rhythm is wanted, but all its rows have one time.
    """
    draw = random.Random(seed)
    first = draw.randrange(len(rows))
    if own_rhythm:
        times_s = _own_times(rows, rate, num_requests, first)
    else:
        times_s, now = [], 0.0
        for _ in range(num_requests):
            now += draw.expovariate(rate)
            times_s.append(now)
    requests = []
    for index, time_s in enumerate(times_s):
        lap, at = divmod(first + index, len(rows))
        row = rows[at]
        blocks = row.hash_ids or ()
        if lap:
            blocks = tuple(block + lap * ROUND_IDS for block in blocks)
        requests.append(Request(index, time_s, row.input_tokens, row.output_tokens, blocks))
    return requests


def _own_times(rows: Sequence[TraceRow], rate: float, num_requests: int, first: int) -> list[float]:
    span_s = rows[-1].time_s
    if span_s <= 0:
        raise ConfigError(
            "The rows of the trace all have one time, so it has no rhythm: use Poisson arrivals."
        )
    lap_s = span_s * len(rows) / max(1, len(rows) - 1)
    times_s = []
    for index in range(num_requests):
        lap, at = divmod(first + index, len(rows))
        times_s.append(lap * lap_s + rows[at].time_s - rows[first].time_s)
    length_s = times_s[-1]
    if length_s <= 0:
        raise ConfigError(
            "The rows taken from the trace all have one time: use Poisson arrivals or more rows."
        )
    scale = (num_requests - 1) / rate / length_s
    return [time_s * scale for time_s in times_s]
