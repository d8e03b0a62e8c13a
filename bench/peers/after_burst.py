"""Latencies of a closed loop after its first burst, of the requests that took another one's place. Pure.

A loop of N in flight begins with N requests at once. Their prompts wait for one another, so their first
tokens are those of a burst, whatever the server would do with requests that come one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.load.figures.latency import derive
from bench.load.figures.metrics import distribution
from bench.load.records import RequestRecord, Status

AFTER_BURST = "after_burst"  # of a result


def after_burst(records: Sequence[RequestRecord], concurrency: int) -> dict[str, Any] | None:
    """Percentiles over the requests after the first `concurrency`, by the names of a result. None: there was
    no burst, or nothing after it."""
    if concurrency == 1 or len(records) <= concurrency:
        return None
    later = [
        derive(record) for record in records if record.index >= concurrency and record.status is Status.OK
    ]
    kept: dict[str, Any] = {"num": len(later)}
    for name, values in (
        ("ttft", [one.ttft_s for one in later if one.ttft_s is not None]),
        ("tpot", [one.tpot_s for one in later if one.tpot_s is not None]),
    ):
        found = distribution(values, (99.0,))
        kept |= {
            f"{which}_{name}_ms": None if value_s is None else value_s * 1e3
            for which, value_s in (("median", found.median_s), ("p99", found.percentiles_s["99"]))
        }
    return kept
