"""The requests of a run as rows: when each was under way, and what its time was spent on.

1. `choose_rows` takes at most so many requests, failed ones first. What was never sent has no row.
2. `timeline_row` lays one out: late sending, then the server's own account if it sent one, else ours.
3. Two charts show the same rows: on the run's clock (what overlapped), and each from its own scheduled time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.load.figures.latency import derive, output_len
from bench.load.records import RequestRecord, Status
from bench.load.report.distribution_charts import evenly
from bench.load.report.frame import Axis, Mark
from bench.load.report.gantt import PHASE_NAMES, Phase, Row, Segment, gantt
from bench.load.report.scales import duration, quantity
from bench.load.report.values import Block, Figure, Omitted, ReportRun, Table

MAX_TIMELINE_ROWS = 200
STATUS_NAMES = {Status.SKIPPED: "never sent"}
_MAX_ERROR_CHARS = 160


def timeline_charts(run: ReportRun, window: Sequence[Mark], limit: int = MAX_TIMELINE_ROWS) -> list[Block]:
    """One row per request by scheduled time, on the run's clock and from each request's own."""
    titles = ("Timeline of requests", "Each request from its scheduled time")
    if run.records is None or not run.records.records:
        return [Omitted(title, "no per-request records at hand") for title in titles]
    records = [record for record in run.records.records if record.status is not Status.SKIPPED]
    num_unsent = len(run.records.records) - len(records)
    if not records:
        return [Omitted(title, f"none of {num_unsent:,} requests was sent") for title in titles]
    shown = choose_rows(records, limit)
    rows = [timeline_row(record) for record in shown]
    note = "One row per request, by scheduled time"
    if len(shown) < len(records):
        num_failed = sum(record.status is not Status.OK for record in shown)
        of_them = f" ({num_failed:,} of them failed)" if num_failed else ""
        note += f": {len(shown):,} of {len(records):,} drawn, evenly taken{of_them}"
    if num_unsent:
        note += f". {num_unsent:,} more were never sent and have no row"
    clock = Axis("seconds since the run's start", lo=0.0, is_tight=True)
    own = "The same rows moved to a common start"
    if any(record.timings for record in shown):
        own += "; queue, prefill, KV transfer and decode are the server's own account, laid out from the send"
    moved = [moved_row(row, record.scheduled_s) for row, record in zip(rows, shown, strict=True)]
    counts = [(s, sum(record.status is s for record in run.records.records)) for s in Status]
    table = Table(["status", "requests"], [[STATUS_NAMES.get(s, s.value), f"{n:,}"] for s, n in counts if n])
    since = Axis("seconds since the scheduled time", lo=0.0, is_tight=True)
    return [
        Figure(titles[0], note + ".", gantt(titles[0], rows, clock, upright=window), table),
        Figure(titles[1], own + ".", gantt(titles[1], moved, since), _phase_table(rows)),
    ]


def _phase_table(rows: Sequence[Row]) -> Table:
    totals: dict[Phase, list[float]] = {}
    for row in rows:
        for segment in row.segments:
            totals.setdefault(segment.phase, []).append(segment.end - segment.start)
    headers = ["phase", "requests", "mean", "longest"]
    cells = [
        [PHASE_NAMES[phase], f"{len(v):,}", duration(sum(v) / len(v)), duration(max(v))]
        for phase in PHASE_NAMES
        if (v := totals.get(phase))
    ]
    return Table(headers, cells)


def moved_row(row: Row, by_s: float) -> Row:
    """The row with `by_s` taken off every moment."""
    return replace(
        row,
        segments=tuple(Segment(s.start - by_s, s.end - by_s, s.phase) for s in row.segments),
        first_token=None if row.first_token is None else row.first_token - by_s,
        failed_at=None if row.failed_at is None else row.failed_at - by_s,
    )


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
        parts.append(record.error[:_MAX_ERROR_CHARS])
    return ", ".join(parts)
