"""The run over time: one row per slice, for the timeline chart and for seeing overload build up.

Slices cover the whole run, warm-up included, from the first scheduled time to whatever came last. Each
offered request is counted once as offered (by scheduled time) and once as completed or failed (by its end, or
by its scheduled time if it has none).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bench.load.activity import Activity, Floats
from bench.load.latency import Latency
from bench.load.records import RequestRecord, Status

MIN_SLICE_S = 1.0
MAX_SLICES = 60


class Timeslice(msgspec.Struct, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    offered: int
    completed: int
    failed: int
    running: float  # mean number between first token and end
    waiting: float  # mean number between scheduled time and first token
    output_tokens_per_s: float  # all that was streamed, by chunk moments
    num_ttft: int
    ttft_p50_s: float | None  # of OK requests scheduled in the slice
    ttft_p99_s: float | None


def slice_run(
    records: Sequence[RequestRecord], latencies: Sequence[Latency], activity: Activity
) -> tuple[Timeslice, ...]:
    """Slices of one second, or of a sixtieth of a run longer than a minute."""
    if not records:
        return ()
    scheduled_s = np.array([record.scheduled_s for record in records])
    done_s = np.array([record.scheduled_s if record.end_s is None else record.end_s for record in records])
    is_ok = np.array([record.status is Status.OK for record in records])
    edges_s = slice_edges(float(scheduled_s.min()), float(max(scheduled_s.max(), done_s.max())))
    num = len(edges_s) - 1
    offered_in = _slice_of(scheduled_s, edges_s)
    offered = np.bincount(offered_in, minlength=num)
    completed = np.bincount(_slice_of(done_s[is_ok], edges_s), minlength=num)
    failed = np.bincount(_slice_of(done_s[~is_ok], edges_s), minlength=num)
    running, waiting = activity.mean_running(edges_s), activity.mean_waiting(edges_s)
    tokens = np.bincount(
        _slice_of(activity.token_times_s, edges_s), weights=activity.tokens, minlength=num
    ) / np.diff(edges_s)
    ttfts: list[list[float]] = [[] for _ in range(num)]
    for where, ok, latency in zip(offered_in, is_ok, latencies, strict=True):
        if ok and latency.ttft_s is not None:
            ttfts[where].append(latency.ttft_s)
    return tuple(
        Timeslice(
            start_s=float(edges_s[i]),
            end_s=float(edges_s[i + 1]),
            offered=int(offered[i]),
            completed=int(completed[i]),
            failed=int(failed[i]),
            running=float(running[i]),
            waiting=float(waiting[i]),
            output_tokens_per_s=float(tokens[i]),
            num_ttft=len(ttfts[i]),
            ttft_p50_s=float(np.percentile(ttfts[i], 50)) if ttfts[i] else None,
            ttft_p99_s=float(np.percentile(ttfts[i], 99)) if ttfts[i] else None,
        )
        for i in range(num)
    )


def slice_edges(start_s: float, end_s: float) -> Floats:
    """Edges of equal slices that cover the run; the last one may reach beyond its end."""
    width_s = max(MIN_SLICE_S, (end_s - start_s) / MAX_SLICES)
    num = max(1, int(np.ceil((end_s - start_s) / width_s - 1e-9)))
    return start_s + width_s * np.arange(num + 1, dtype=np.float64)


def _slice_of(moments_s: Floats, edges_s: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Index of the slice [edge i, edge i + 1) of each moment; the run's last moment falls in the last
    slice.
    """
    where = np.searchsorted(edges_s, moments_s, side="right").astype(np.int64) - 1
    return np.clip(where, 0, len(edges_s) - 2)
