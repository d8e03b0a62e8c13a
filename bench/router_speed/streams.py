"""The streams of one run and what they show: tokens per second, the router's CPU, the time a token takes.

The window is the time in which every stream runs: from the moment the last one has its second token to the
moment the first one ends. A token's added latency is the time from right before its engine posts it to the
client's read that brings it; chunk k of a stream is its token k, since every scripted token is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.load.client.pool import run_plan
from bench.load.plan import Arrival, Plan, PlannedRequest
from bench.load.records import RequestRecord, RunRecord, Status
from bench.router_speed.engines import EngineLog, prompt_text
from bench.router_speed.site import MODEL, CpuWatch, Site
from cluster.errors import BatonError

NS = 1_000_000_000
OPENING_S = 1.0  # over which the streams are opened
TIMEOUT_S = 120.0
MIN_ACHIEVED = 0.97


@dataclass(frozen=True, slots=True)
class Window:
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / NS


def stream_plan(num_streams: int, tokens_per_stream: int) -> Plan:
    """Chats as apps send them, each with its number in the prompt."""
    requests = tuple(
        PlannedRequest(
            index=index,
            scheduled_s=OPENING_S * index / num_streams,
            body={"messages": [{"role": "user", "content": prompt_text(index)}]},
            output_tokens=tokens_per_stream,
        )
        for index in range(num_streams)
    )
    shared = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens_per_stream,
        "ignore_eos": True,
    }
    arrival = Arrival(kind="constant", seed=0, rate=num_streams / OPENING_S)
    return Plan(
        endpoint="/v1/chat/completions", shared_body=shared, requests=requests, arrival=arrival, workload={}
    )


def offer_streams(site: Site, num_streams: int, tokens_per_stream: int, core: int | None) -> RunRecord:
    """
    Raises:
        BatonError: a stream did not come whole: the figures would be of something else.
    """
    plan = stream_plan(num_streams, tokens_per_stream)
    run = run_plan(plan, site.target, timeout_s=TIMEOUT_S, cores=() if core is None else (core,))
    for record in run.records:
        if record.status is not Status.OK or len(record.chunk_times_s) != tokens_per_stream:
            raise BatonError(
                f"stream {record.index}: {record.status.value}, {len(record.chunk_times_s)} chunks of "
                f"{tokens_per_stream} tokens: {record.error}"
            )
    return run


def window_of(run: RunRecord) -> Window:
    """
    Raises:
        BatonError: the first stream ended before the last one began.
    """
    start_s = max(record.chunk_times_s[1] for record in run.records)
    end_s = min(record.chunk_times_s[-1] for record in run.records)
    if end_s <= start_s:
        raise BatonError("the streams never ran all at once: let them last longer")
    return Window(run.start_ns + round(start_s * NS), run.start_ns + round(end_s * NS))


def figures(run: RunRecord, log: EngineLog, watch: CpuWatch, offered_tokens_per_s: float) -> dict[str, Any]:
    """What one run showed."""
    window = window_of(run)
    added_ms = _added_ms(run.records, run.start_ns, log, window)
    tokens_per_s = len(added_ms) / window.seconds
    cpu_s = watch.used_s(window.start_ns, window.end_ns)
    [client] = run.clients
    return {
        "offered_tokens_per_s": round(offered_tokens_per_s),
        "tokens_per_s": round(tokens_per_s),
        "is_sustained": tokens_per_s >= MIN_ACHIEVED * offered_tokens_per_s,
        "num_streams": len(run.records),
        "window_s": round(window.seconds, 2),
        "router_cpu": round(cpu_s / window.seconds, 3),
        "router_us_per_token": round(cpu_s / len(added_ms) * 1e6, 1),
        "added_latency_ms": percentiles(added_ms),
        "client_cpu": round(client.cpu_s / client.wall_s, 3),
        "stolen_ms": round(watch.taken_s(window.start_ns, window.end_ns) * 1e3),
        "engines_cpu": round(log.cpu_s / client.wall_s, 3),
    }


def _added_ms(
    records: Sequence[RequestRecord], start_ns: int, log: EngineLog, window: Window
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of every token read within the window, in no order."""
    added = []
    for record in records:
        read_ns = np.asarray(record.chunk_times_s) * NS + start_ns
        sent_ns = np.asarray(log.moments_ns[record.index])
        inside = (read_ns >= window.start_ns) & (read_ns < window.end_ns)
        added.append((read_ns - sent_ns)[inside] / 1e6)
    return np.concatenate(added)


def percentiles(values_ms: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    p50, p90, p99, most = np.percentile(values_ms, (50, 90, 99, 100))
    return {"p50": round(p50, 3), "p90": round(p90, 3), "p99": round(p99, 3), "max": round(most, 3)}
