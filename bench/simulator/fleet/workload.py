"""Requests of a simulated run: the rows of a trace, in its order, at a rate of one's choice.

1. `read_trace` reads any of the known formats; times are sorted, empty rows left out, and both are told.
2. A seed chooses the first row; rows follow one another and begin again after the last (with block ids of
   their own: a second round finds nothing of the first in a prefix cache).
3. Arrivals are Poisson at the rate, or the trace's own rhythm, scaled to that mean rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from bench.load.plans.trace_formats import TraceRow
from bench.load.plans.trace_times import find_holes
from bench.load.plans.traces import Trace, read_trace
from bench.simulator.fleet.request import Request
from cluster.errors import ConfigError
from cluster.readable import plural

ROUND_IDS = 1 << 40


def read_rows(
    path: Path, format_name: str | None = None, own_rhythm: bool = False
) -> tuple[Trace, list[str]]:
    """The trace, and a warning for each thing about it that a reader of the result should know.

    Args:
        own_rhythm: requests come in the trace's rhythm, so in its holes nothing comes.

    Raises:
        TraceError: see `read_trace`.
    """
    trace = read_trace(path, format_name)
    warnings = []
    if not trace.was_sorted:
        warnings.append(
            f"{path}: rows were not in order of time ({trace.num_out_of_order:,}); they were sorted."
        )
    if trace.num_empty:
        warnings.append(f"{path}: {trace.num_empty:,} rows without input or output tokens were left out.")
    holes = find_holes([row.time_s for row in trace.rows])
    if holes is not None:
        warnings.append(
            f"{path}: nothing comes in {plural(holes.num, 'hole')} of the trace; the longest lasts "
            f"{holes.longest_s:,.0f} s, from {holes.longest_from_s:,.0f} s on. "
            + (
                _crowded(trace.rows[-1].time_s, holes.total_s)
                if own_rhythm
                else "Its times are not replayed."
            )
        )
    return trace, warnings


def _crowded(span_s: float, holes_s: float) -> str:
    """The rate asked for is a mean over the holes, too."""
    times = span_s / max(span_s - holes_s, 1e-9)
    return (
        f"The rate is the mean over all of it, so in between requests come {times:.3g} times as fast: if "
        "that is no part of the load, cut it out or use Poisson arrivals."
    )


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
