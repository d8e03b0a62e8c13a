"""Whether a file is what it says: a whole result, and requests that are of that result's run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.load.records import RunRecord
from cluster.errors import BatonError

# What every result has; comparisons and reports rest on it.
REQUIRED = (
    *("date", "endpoint", "model_id", "valid", "is_complete", "arrival", "workload", "window"),
    *("num_prompts", "completed", "failed", "duration", "request_throughput", "output_throughput"),
    *("slos_ms", "median_ttft_ms", "median_e2el_ms", "start_unix_s", "wall_s"),
)


class _Result(msgspec.Struct):
    """What kind of value comparisons and reports take the keys of a result for."""

    valid: bool | None
    is_complete: bool | None
    num_prompts: int
    completed: int
    failed: int
    duration: float | None
    request_throughput: float | None
    output_throughput: float | None
    median_ttft_ms: float | None
    median_e2el_ms: float | None
    slos_ms: dict[str, float] | None
    arrival: dict[str, Any]
    workload: dict[str, Any]
    window: dict[str, Any]
    trace: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    per_core: dict[str, float | None] | None = None
    send_lag_ms: dict[str, float | None] | None = None
    failures: dict[str, int] | None = None
    num_samples: dict[str, int] | None = None
    slo_attainment: float | None = None
    slo_attainment_by_metric: dict[str, float | None] | None = None
    slo_attainment_of_sent: float | None = None
    request_goodput: float | None = None
    token_goodput: float | None = None
    total_token_goodput: float | None = None
    total_token_throughput: float | None = None
    goodput_per_gpu: float | None = None
    output_throughput_per_gpu: float | None = None
    offered_request_rate: float | None = None
    request_rate: float | str | None = None  # "inf" where there is none
    max_concurrency: int | None = None
    max_concurrent_requests: int | None = None
    num_sent: int | None = None
    num_good: int | None = None
    num_cores: float | None = None
    num_accelerators: float | None = None
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    total_partial_output_tokens: int | None = None
    total_cached_tokens: int | None = None
    client_cpu_pct: float | None = None
    endpoint: str | None = None
    backend: str | None = None
    model_id: str | None = None
    label: str | None = None
    cautions: list[str] | None = None
    notes: list[str] | None = None
    invalid_reasons: list[str] | None = None


# The latencies: of every request, each by its mean and so on; the percentiles are those that were asked for.
_LATENCY = re.compile(r"(mean|median|std|max|p[\d.]+)_\w+_ms")


class _Search(msgspec.Struct):
    answers: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    label: str | None = None


_TOLERANCE_S = 1e-6  # of moments written and read again


def check_keys(path: Path, result: Mapping[str, Any]) -> None:
    """
    Raises:
        BatonError: keys are missing that every result has, or their values are of another kind; names them.
    """
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise BatonError(
            f"`{path}` is not a whole result of `baton bench`: it lacks {', '.join(missing)}; measure again"
        )
    _check_kinds(path, result, _Result, "run")
    for key, value in result.items():
        if _LATENCY.fullmatch(key):
            _check_kinds(path, value, float | None, "run", key)


def check_search(path: Path, found: Mapping[str, Any]) -> None:
    """
    Raises:
        BatonError: it lacks what every search has, or has another kind of value there.
    """
    _check_kinds(path, found, _Search, "search")


def _check_kinds(path: Path, found: Any, kind: Any, what: str, key: str | None = None) -> None:
    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        why = error if key is None else f"{error} - at `$.{key}`"
        raise BatonError(f"`{path}` is not the whole result of a {what} ({why}); measure again") from None


def check_requests(beside: Path, path: Path, result: Mapping[str, Any], run: RunRecord) -> None:
    """The requests are those of the result: as many, and the last one ended when the run did.

    Raises:
        BatonError: they are of another run.
    """
    window = result["window"]
    num = window.get("num_run_offered") if isinstance(window, Mapping) else None
    advice = "they are of different runs: put the two files of one run side by side, or measure again"
    if num is not None and num != len(run.records):
        raise BatonError(
            f"`{beside}` has {len(run.records):,} requests, but the run of `{path}` offered {num:,}; {advice}"
        )
    ended_s = max((record.end_s for record in run.records if record.end_s is not None), default=0.0)
    if not math.isclose(ended_s, run.wall_s, abs_tol=_TOLERANCE_S):
        raise BatonError(
            f"The requests of `{beside}` ended after {ended_s:.3f} s, but the run of `{path}` "
            f"({result['date']}) after {run.wall_s:.3f} s; {advice}"
        )
