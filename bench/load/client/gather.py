"""What the parent knows while a run goes on, and the one record per request it ends with. No IO, no clock.

A request whose client process died has a record too: cancelled if its sending had begun, skipped if not.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Reversible, Sequence

import msgspec

from bench.load.client.flight import blank_record
from bench.load.client.frames import Job, Tick
from bench.load.client.offering import Due
from bench.load.figures.latency import output_len
from bench.load.records import ClientReport, RequestRecord, RunRecord, Status

RECENT_S = 5.0
MAX_GAPS = (
    4000  # a display is no figure: all gaps of a fast server, four times a second, would cost half a core
)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The run at a glance; `recent_*` are over what ended within the last `RECENT_S` seconds."""

    elapsed_s: float
    num_planned: int
    num_offered: int  # sending had begun
    num_in_flight: int
    num_ended: dict[Status, int]
    num_output_tokens: int  # of ended requests, failed ones too, as results count; of others one per chunk
    recent_ttft_s: float | None = None  # median, from the scheduled time
    recent_ttft_p99_s: float | None = None
    recent_itl_s: float | None = (
        None  # median of the gaps between chunks, of at least `MAX_GAPS` if there are
    )
    recent_tokens_per_s: float = 0.0


class Gathering:
    """Owner of the run's records. `shares[process]` are the jobs each client process was given."""

    def __init__(self, shares: Sequence[Sequence[Job]]) -> None:
        self._shares = shares
        self._records: dict[int, RequestRecord] = {}
        self._started: dict[int, float] = {}  # index |-> scheduled_s
        self._reports: dict[int, ClientReport] = {}
        self._in_flight = [0] * len(shares)
        self._chunks = [0] * len(shares)
        self._ended: Counter[Status] = Counter()
        self._num_ended_tokens = 0
        self._recent: deque[RequestRecord] = deque()
        self._token_history: deque[tuple[float, int]] = deque()
        self._notes: list[str] = []

    def take_tick(self, process: int, tick: Tick) -> None:
        self._started.update(tick.started)
        self._in_flight[process] = tick.num_in_flight
        self._chunks[process] = tick.num_chunks
        for record in tick.records:
            self._take(record)

    def take_report(self, report: ClientReport) -> None:
        self._reports[report.process] = report

    def note(self, sentence: str) -> None:
        """Why the run is not complete."""
        if sentence not in self._notes:
            self._notes.append(sentence)

    def lost(self, process: int, why: str, now_s: float) -> None:
        """A client process is gone: its requests without a record end here."""
        self.note(f"client process {process} {why}")
        self._in_flight[process] = self._chunks[process] = 0
        for job in self._shares[process]:
            if job.index in self._records:
                continue
            scheduled_s = self._started.get(job.index)
            if scheduled_s is None:
                status, error = Status.SKIPPED, f"not sent: client process {process} {why}"
                scheduled_s = job.scheduled_s if job.turn == 0 else now_s
            else:
                status, error = Status.CANCELLED, f"in flight when client process {process} {why}"
            record = blank_record(Due(scheduled_s, job), status, error, process)
            if status is Status.CANCELLED:
                record.end_s = now_s
            self._take(record)

    def progress(self, elapsed_s: float) -> Progress:
        while self._recent and (self._recent[0].end_s or 0.0) < elapsed_s - RECENT_S:
            self._recent.popleft()
        ttfts = [
            record.chunk_times_s[0] - record.scheduled_s for record in self._recent if record.chunk_times_s
        ]
        gaps = newest_gaps(self._recent)
        num_tokens = self._num_ended_tokens + sum(self._chunks)
        self._token_history.append((elapsed_s, num_tokens))
        while self._token_history[0][0] < elapsed_s - RECENT_S:
            self._token_history.popleft()
        since_s, before = self._token_history[0]
        return Progress(
            elapsed_s=elapsed_s,
            num_planned=sum(len(share) for share in self._shares),
            num_offered=len(self._started),
            num_in_flight=sum(self._in_flight),
            num_ended=dict(self._ended),
            num_output_tokens=num_tokens,
            recent_ttft_s=statistics.median(ttfts) if ttfts else None,
            recent_ttft_p99_s=p99(ttfts),
            recent_itl_s=statistics.median(gaps) if gaps else None,
            recent_tokens_per_s=(num_tokens - before) / (elapsed_s - since_s) if elapsed_s > since_s else 0.0,
        )

    def run_record(self, start_unix_s: float, start_ns: int) -> RunRecord:
        """Every client process must have finished or been lost."""
        records = [self._records[job.index] for share in self._shares for job in share]
        records.sort(key=lambda record: record.index)
        if not self._notes and len(records) != len(self._records):
            raise AssertionError("a record without a planned request")
        return RunRecord(
            records=records,
            clients=[self._reports[process] for process in sorted(self._reports)],
            start_unix_s=start_unix_s,
            start_ns=start_ns,
            wall_s=max((record.end_s for record in records if record.end_s is not None), default=0.0),
            is_complete=not self._notes,
            notes=list(self._notes),
        )

    def _take(self, record: RequestRecord) -> None:
        self._records[record.index] = record
        self._ended[record.status] += 1
        self._num_ended_tokens += output_len(record)
        if record.end_s is not None:
            self._recent.append(record)


def newest_gaps(records: Reversible[RequestRecord]) -> list[float]:
    """Between chunks of the records from the last one on, until there are `MAX_GAPS`."""
    gaps: list[float] = []
    for record in reversed(records):
        if len(gaps) >= MAX_GAPS:
            break
        gaps += [later - earlier for earlier, later in itertools.pairwise(record.chunk_times_s)]
    return gaps


def p99(values: Sequence[float]) -> float | None:
    """With linear interpolation, as all percentiles of a result; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[-1]
