"""One run over time: tokens per second, requests running and waiting, and the timeline of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bench.load.activity import Activity
from bench.load.latency import derive, output_len
from bench.load.records import RequestRecord, Status
from bench.load.report.bars import Layer, stacked_steps
from bench.load.report.distribution_charts import evenly
from bench.load.report.frame import Axis, Mark
from bench.load.report.gantt import Phase, Row, Segment, gantt
from bench.load.report.scales import duration, nice_step, quantity
from bench.load.report.values import Block, Figure, Omitted, ReportRun, Table

MAX_SLICES = 120
MIN_SLICE_S = 0.05
MAX_TIMELINE_ROWS = 200
_MAX_TABLE_ROWS = 60
_TIME = Axis("seconds since the run's start", lo=0.0)


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


def timeline_chart(run: ReportRun, window: Sequence[Mark]) -> Block:
    """One row per request by scheduled time.

    Where there are too many, up to half of the rows go to requests that failed; both kinds are taken evenly.
    """
    title = "Timeline of requests"
    if run.records is None or not run.records.records:
        return Omitted(title, "no per-request records at hand")
    shown = choose_rows(run.records.records)
    rows = [timeline_row(record) for record in shown]
    note = "One row per request, in order of scheduled time. "
    if len(shown) < len(run.records.records):
        num_failed = sum(record.status is not Status.OK for record in shown)
        note += (
            f"{len(shown):,} of {len(run.records.records):,} requests are drawn, taken evenly over the run "
            f"({num_failed:,} of them failed). "
        )
    if any(record.timings for record in shown):
        note += "Queue, prefill, KV transfer and decode are the server's own account, laid out from the send."
    statuses = {status: sum(record.status is status for record in run.records.records) for status in Status}
    table = Table(["status", "requests"], [[s.value, f"{n:,}"] for s, n in statuses.items() if n])
    return Figure(title, note, gantt(title, rows, _TIME, upright=window), table, is_wide=True)


def choose_rows(records: Sequence[RequestRecord], limit: int = MAX_TIMELINE_ROWS) -> list[RequestRecord]:
    failed = [record for record in records if record.status is not Status.OK]
    done = [record for record in records if record.status is Status.OK]
    num_failed = min(len(failed), max(limit // 2, limit - len(done)))
    chosen = evenly(failed, num_failed) + evenly(done, limit - num_failed)
    return sorted(chosen, key=lambda record: (record.scheduled_s, record.index))


def timeline_row(record: RequestRecord) -> Row:
    """Segments in seconds; the server's account is cut off at the request's end."""
    end_s = record.end_s
    first_s = record.chunk_times_s[0] if record.chunk_times_s else None
    last_s = (
        end_s if end_s is not None else record.chunk_times_s[-1] if record.chunk_times_s else record.sent_s
    )
    segments: list[Segment] = []
    if record.sent_s is not None and last_s is not None:
        segments.append(Segment(record.scheduled_s, record.sent_s, Phase.LAG))
        account = server_account(record)
        if account:
            at = record.sent_s
            for phase, length_s in account:
                segments.append(Segment(at, min(at + length_s, last_s), phase))
                at = min(at + length_s, last_s)
            segments.append(Segment(at, last_s, Phase.STREAM))
        elif first_s is None:
            segments.append(Segment(record.sent_s, last_s, Phase.WAIT))
        else:
            segments += [
                Segment(record.sent_s, first_s, Phase.WAIT),
                Segment(first_s, last_s, Phase.STREAM),
            ]
    is_ok = record.status is Status.OK
    failed_at = None if is_ok else last_s if last_s is not None else record.scheduled_s
    visible = tuple(s for s in segments if s.end - s.start > 1e-4)
    return Row(_row_tip(record), visible, first_s, failed_at)


def server_account(record: RequestRecord) -> list[tuple[Phase, float]]:
    """The server's `timings` of an answer as phases in their order, in seconds; [] where it sent none."""
    keys = {
        "queue_ms": Phase.QUEUE,
        "prefill_ms": Phase.PREFILL,
        "kv_transfer_ms": Phase.TRANSFER,
        "decode_ms": Phase.DECODE,
    }
    phases: list[tuple[Phase, float]] = []
    for key, phase in keys.items():
        value = record.timings.get(key)
        if isinstance(value, int | float) and value > 0:
            phases.append((phase, value / 1e3))
    return phases


def _row_tip(record: RequestRecord) -> str:
    latency = derive(record)
    parts = [f"request {record.index}", f"due {quantity(record.scheduled_s)} s", record.status.value]
    if latency.ttft_s is not None:
        parts.append(f"TTFT {duration(latency.ttft_s)}")
    if latency.e2e_s is not None:
        parts.append(f"E2E {duration(latency.e2e_s)}")
    parts.append(f"{output_len(record):,} tokens")
    if record.error:
        parts.append(record.error[:160])
    return ", ".join(parts)
