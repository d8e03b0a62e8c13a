"""Which rows of a trace are offered, and when: pure decisions over a trace that has been read.

1. Lengths are divided by `scale`.
2. Rows that do not fit the model are skipped or cut (`settings.Oversize`), and counted.
3. The first row is chosen: at `offset_s`, or by the seed among those that leave enough rows.
4. With trace arrivals a row comes when its timestamp says, divided by the speed-up. If a rate R is wanted, R
   times the duration rows are taken, and the speed-up is R over their own mean rate (rows less one over the
   time from first to last): the trace's rhythm at exactly the mean rate R.
   Holes in them are told: nothing is offered there.
5. With other arrivals the schedule gives the times, and the rows follow one another.
6. Without a limit all rows from the first one on are offered.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.load.plan import Arrival
from bench.load.plans.arrivals import schedule
from bench.load.plans.randomness import generator
from bench.load.plans.settings import PlanSettings, TraceReplay
from bench.load.plans.trace_formats import TraceRow
from bench.load.plans.trace_times import find_holes
from bench.load.plans.traces import Trace
from bench.load.plans.workloads import fit_lengths
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Selection:
    rows: list[TraceRow]
    times_s: list[float]
    arrival: Arrival  # as it came out: trace arrivals with their rate
    speed_up: float
    facts: dict[str, Any]


def select(trace: Trace, workload: TraceReplay, settings: PlanSettings) -> Selection:
    """The rows to offer and their times.

    Raises:
        ConfigError: settings that contradict one another, or more requests asked for than there are rows.
    """
    rows, facts = _fitting(trace, workload, settings)
    arrival = settings.arrival
    if arrival.kind != "trace":
        if workload.speed_up != 1.0:
            raise ConfigError(
                f"--speed-up changes the trace's own timestamps, which {arrival.kind} arrivals do not use: "
                "leave --speed-up or the other arrival out."
            )
        times_s = schedule(arrival, _limit(rows, workload, settings), settings.duration_s)
        start = _start(rows, workload, settings, last_start=len(rows) - len(times_s))
        taken = rows[start : start + len(times_s)]
        _check_enough(trace, len(taken), len(times_s))
        return Selection(taken, times_s, arrival, 1.0, facts)
    return _at_own_times(trace, rows, workload, settings, facts)


def _fitting(
    trace: Trace, workload: TraceReplay, settings: PlanSettings
) -> tuple[list[TraceRow], dict[str, Any]]:
    rows: list[TraceRow] = []
    num_clamped = 0
    for row in trace.rows:
        lengths = (
            max(1, int(row.input_tokens / workload.scale)),
            max(1, int(row.output_tokens / workload.scale)),
        )
        fitting = fit_lengths(*lengths, settings.max_model_len, settings.oversize)
        if fitting is None:
            continue
        num_clamped += fitting != lengths
        rows.append(replace(row, input_tokens=fitting[0], output_tokens=fitting[1]))
    if not rows:
        raise ConfigError(
            f"No row of {trace.path} fits a model of {settings.max_model_len} tokens: use a larger scale, "
            "or clamp."
        )
    facts: dict[str, Any] = {
        "num_rows_file": len(trace.rows) + trace.num_empty,
        "num_rows_empty": trace.num_empty,
        "num_rows_oversize_skipped": len(trace.rows) - len(rows),
        "num_rows_oversize_clamped": num_clamped,
        "block_tokens_scaled": workload.block_tokens / workload.scale
        if any(row.hash_ids for row in rows)
        else None,
        "rows_were_sorted": trace.was_sorted,
        "num_rows_out_of_order": trace.num_out_of_order,
        "unknown_fields": list(trace.unknown_fields),
    }
    return rows, facts


def _at_own_times(
    trace: Trace, rows: list[TraceRow], workload: TraceReplay, settings: PlanSettings, facts: dict[str, Any]
) -> Selection:
    window = _window(trace, rows, workload, settings)
    span_s = window[-1].time_s - window[0].time_s
    native_rate = (len(window) - 1) / span_s if span_s > 0 else None
    speed_up = workload.speed_up
    rate = settings.arrival.rate
    if rate is not None:
        if native_rate is None:
            raise ConfigError(
                f"The rows taken from {trace.path} all have one timestamp, so no speed-up gives them a "
                "mean rate: use --arrival poisson with the --rate."
            )
        speed_up = rate / native_rate
    elif native_rate is not None:
        rate = native_rate * speed_up
    arrival = Arrival(
        kind="trace",
        seed=settings.arrival.seed,
        rate=rate,
        details={"speed_up": speed_up, "native_rate": native_rate},
    )
    times_s = [(row.time_s - window[0].time_s) / speed_up for row in window]
    facts = facts | _hole_facts(window, speed_up)
    return Selection(window, times_s, arrival, speed_up, facts)


def _hole_facts(window: list[TraceRow], speed_up: float) -> dict[str, Any]:
    holes = find_holes([row.time_s for row in window])
    if holes is None:
        return {"num_holes": 0}
    return {
        "num_holes": holes.num,
        "longest_hole_trace_s": holes.longest_s,
        "longest_hole_run_s": holes.longest_s / speed_up,
        "longest_hole_from_run_s": (holes.longest_from_s - window[0].time_s) / speed_up,
    }


def num_skipped_among(rows: Sequence[TraceRow]) -> int:
    """Rows of the file between the first and the last of `rows` that are not among them: without tokens, or
    too long for the model.
    """
    return rows[-1].position - rows[0].position + 1 - len(rows) if rows else 0


def _window(
    trace: Trace, rows: list[TraceRow], workload: TraceReplay, settings: PlanSettings
) -> list[TraceRow]:
    """The rows that come within the limits, which count in rows if a rate is wanted, and in trace time
    else.
    """
    num, duration_s, rate = settings.num_requests, settings.duration_s, settings.arrival.rate
    if rate is not None:
        if workload.speed_up != 1.0:
            raise ConfigError(
                "--rate and --speed-up both set the pace of a trace's arrivals: give one of them."
            )
        by_time = math.inf if duration_s is None else round(rate * duration_s)
        num = min(len(rows) if num is None else num, int(min(by_time, len(rows) + 1)))
        if num < 2:
            raise ConfigError(
                f"{num} request{' has' if num == 1 else 's have'} no rate of {rate:g}/s, which takes two: "
                "use a longer duration, a higher rate or a longer trace."
            )
        duration_s = None
    window_s = 0.0 if duration_s is None else duration_s * workload.speed_up
    last_start = bisect_left(rows, rows[-1].time_s - window_s, key=lambda row: row.time_s)
    start = _start(rows, workload, settings, last_start=min(last_start, len(rows) - (num or 1)))
    window = rows[start : None if num is None else start + num]
    if num is not None:
        _check_enough(trace, len(window), num)
    if duration_s is not None:
        end_s = window[0].time_s + window_s
        window = window[: bisect_left(window, end_s, key=lambda row: row.time_s)]
    return window


def _limit(rows: list[TraceRow], workload: TraceReplay, settings: PlanSettings) -> int | None:
    """How many rows other arrivals may take: without any limit, all from the first one on."""
    if settings.num_requests is not None or settings.duration_s is not None:
        return settings.num_requests
    return len(rows) - _start(rows, workload, settings, last_start=0)


def _start(rows: list[TraceRow], workload: TraceReplay, settings: PlanSettings, last_start: int) -> int:
    if workload.random_offset:
        return int(generator(settings.seed, "trace offset").integers(0, max(last_start, 0), endpoint=True))
    start = bisect_left(rows, workload.offset_s, key=lambda row: row.time_s)
    if start == len(rows):
        raise ConfigError(
            f"The trace ends at {rows[-1].time_s:.1f} s, before the offset of {workload.offset_s:g} s: use "
            "a smaller one."
        )
    return start


def _check_enough(trace: Trace, num_found: int, num_wanted: int) -> None:
    if num_found < num_wanted:
        raise ConfigError(
            f"{num_wanted} requests were asked for, but {trace.path} has {num_found} usable rows from the "
            "chosen start: ask for fewer, or start earlier."
        )
