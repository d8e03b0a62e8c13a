"""The keys that only vLLM's own tools read: per-request arrays, and how a ramp is told."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from bench.load.latency import derive, gaps
from bench.load.plan import Arrival
from bench.load.records import RunRecord


def detailed_arrays(run: RunRecord) -> dict[str, list[Any]]:
    """vLLM's arrays, in seconds, one entry per request of the run in plan order.

    As in vLLM's files, a time that does not exist is 0.0 and an answer without error has the error "". Where
    vLLM counts from the send, these count from the scheduled time, as every figure of ours: `start_times` are
    the scheduled times, so a start plus its ttft is the moment of the first content. `queue_times` are the
    send lags.
    """
    latencies = [derive(record) for record in run.records]
    return {
        "input_lens": [record.input_tokens or record.planned_input_tokens or 0 for record in run.records],
        "output_lens": [latency.output_len for latency in latencies],
        "ttfts": [latency.ttft_s or 0.0 for latency in latencies],
        "itls": [gaps(record) for record in run.records],
        "latencies": [latency.e2e_s or 0.0 for latency in latencies],
        "start_times": [record.scheduled_s for record in run.records],
        "queue_times": [latency.send_lag_s or 0.0 for latency in latencies],
        "generated_texts": [record.text for record in run.records],
        "errors": [record.error or "" for record in run.records],
    }


def ramp_keys(arrival: Arrival, start_unix_s: float) -> dict[str, Any]:
    """`ramp_up_*` and `rps_change_events`; nothing for other arrivals."""
    if arrival.kind != "ramp":
        return {}
    shape, over_s = arrival.details["shape"], arrival.details["over_s"]
    start_rate, end_rate = arrival.details["start_rate"], arrival.details["end_rate"]
    return {
        "ramp_up_strategy": shape,
        "ramp_up_start_rps": start_rate,
        "ramp_up_end_rps": end_rate,
        "rps_change_events": [
            {"rps": rate, "timestamp": datetime.fromtimestamp(start_unix_s + at_s, UTC).isoformat()}
            for rate, at_s in _whole_rates(shape, start_rate, end_rate, over_s)
        ],
    }


def _whole_rates(shape: str, start_rate: float, end_rate: float, over_s: float) -> list[tuple[int, float]]:
    """(whole requests per second, seconds since the start) whenever the rate of a ramp passes a whole
    number.
    """
    if start_rate == end_rate:
        return [(int(start_rate), 0.0)]
    low, high = sorted((start_rate, end_rate))
    passed = [rate for rate in range(math.ceil(low), math.floor(high) + 1) if shape == "linear" or rate > 0]
    if start_rate > end_rate:
        passed.reverse()
    if shape == "linear":
        return [(rate, over_s * (rate - start_rate) / (end_rate - start_rate)) for rate in passed]
    growth = math.log(end_rate / start_rate)
    return [(rate, over_s * math.log(rate / start_rate) / growth) for rate in passed]
