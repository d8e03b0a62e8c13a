"""The JSON that the page draws: one bounded picture of the cluster, and what changed of it. Pure.

A picture has sections. `PictureDiffer` keeps what one viewer was sent last and yields the sections that
differ, lanes by their change number; the viewer's own copy is complete again after each of them. Times are
the router's clock, `now` among them: the viewer compares them with nothing of its own but that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.delivery import ClusterSnapshot, WorkerStatus
from router.lanes import Lane
from router.page_feed import PageFeed
from router.page_window import SLICE_S, WindowPoint, WindowTotals

FORMAT = 1  # of the whole picture; a page of another one reloads


def picture(
    feed: PageFeed, cluster: ClusterSnapshot, model: str, version: str, now: float, since: int = 0
) -> dict[str, Any]:
    """Every section; of the lanes, those that changed after change number `since`."""
    targets = feed.window.targets
    return {
        "now": round(now, 4),
        "about": {
            "format": FORMAT,
            "model": model,
            "version": version,
            "slo": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
        },
        "cluster": {
            "state": cluster.state,
            "queued": cluster.queued,
            "in_flight": feed.counts.num_live,
            "without_lane": feed.num_without_lane,
            "arrived": feed.counts.num_arrived,
            "retried": feed.counts.num_retried,
        },
        "workers": [_worker(worker) for worker in cluster.workers],
        "window": _window(feed.window.totals(now)),
        "series": {"slice_s": SLICE_S, "points": [_point(point) for point in feed.window.series(now)]},
        "change": feed.change,
        "lanes": _lanes(feed.lanes(since)),
    }


class PictureDiffer:
    """What one viewer has."""

    def __init__(self) -> None:
        self._sent: dict[str, Any] = {}
        self._change = 0

    @property
    def since(self) -> int:
        """The change number of the lanes that the viewer has."""
        return self._change

    def update(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The part of a picture `since` that is new to the viewer: `now` and what differs, or nothing."""
        part = {
            name: section
            for name, section in whole.items()
            if name not in ("now", "lanes", "change") and section != self._sent.get(name)
        }
        self._sent |= part
        if whole["lanes"]:
            part["lanes"] = whole["lanes"]
        self._change = whole["change"]
        return part | {"now": whole["now"]} if part else {}


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    load = worker.load
    return {
        "id": worker.worker,
        "role": worker.role.value,
        "state": worker.state,
        "epoch": worker.epoch,
        "running": load.running,
        "waiting": load.waiting,
        "max_num_seqs": worker.max_num_seqs,
        "queued_prefill_tokens": load.queued_prefill_tokens,
        "kv": {"used": load.blocks_used, "cached": load.blocks_cached, "free": load.blocks_free},
        "step_ms": round(load.decode_step_s * 1000, 1),
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s),
        "preemptions": load.preemptions,
    }


def _lanes(lanes: Iterable[Lane]) -> list[dict[str, Any]]:
    return [
        {
            "id": lane.request,
            "prompt": lane.num_prompt_tokens,
            "cached": lane.num_cached_tokens,
            "tokens": lane.num_tokens,
            "attempts": lane.num_attempts,
            "prefill": lane.prefill,
            "decode": lane.decode,
            "kv_bytes": lane.kv_bytes,
            "spans": [[span.stage.value, round(span.at, 4)] for span in lane.spans],
            "end": None if lane.end is None else lane.end.value,
            "ended_at": None if lane.ended_at is None else round(lane.ended_at, 4),
        }
        for lane in lanes
    ]


def _window(totals: WindowTotals) -> dict[str, Any]:
    return {
        "seconds": round(totals.seconds),
        "finished": totals.num_finished,
        "failed": totals.num_failed,
        "left": totals.num_left,
        "good": totals.num_good,
        "attainment": _rounded(totals.attainment),
        "tokens_per_s": round(totals.num_tokens / totals.seconds, 1),
        "requests_per_s": round((totals.num_finished + totals.num_failed) / totals.seconds, 3),
        "ttft_s": {f"p{percent}": _rounded(value) for percent, value in totals.ttft_s.items()},
        "tpot_s": {f"p{percent}": _rounded(value) for percent, value in totals.tpot_s.items()},
    }


def _point(point: WindowPoint) -> list[Any]:
    """[ended, attainment, tokens, TTFT p95, TPOT p95]"""
    return [
        point.num_ended,
        _rounded(point.attainment),
        point.num_tokens,
        _rounded(point.ttft_p95_s),
        _rounded(point.tpot_p95_s),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
