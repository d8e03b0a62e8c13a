"""Whether a file is what it says: a whole result, and requests that are of that result's run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.load.records import RunRecord
from cluster.errors import BatonError

# What every result has; comparisons and reports rest on it.
REQUIRED = (
    *("date", "endpoint", "model_id", "valid", "is_complete", "arrival", "workload", "window"),
    *("num_prompts", "completed", "failed", "duration", "request_throughput", "output_throughput"),
    *("slos_ms", "median_ttft_ms", "median_e2el_ms", "start_unix_s", "wall_s"),
)
_TOLERANCE_S = 1e-6  # of moments written and read again


def check_keys(path: Path, result: Mapping[str, Any]) -> None:
    """
    Raises:
        BatonError: keys are missing that every result has; names them.
    """
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise BatonError(
            f"`{path}` is not a whole result of `baton bench`: it lacks {', '.join(missing)}; measure again"
        )


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
