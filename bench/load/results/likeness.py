"""What two results have in common: their settings flattened, and where those differ, named by path.

1. `work_of` takes from a result what was asked of the server: the settings of the workload without what every
   run draws anew (salt, seed) and what goes with its rate and length (speed-up, counts, totals).
2. `differences` names each path at which two values differ, as `output.tokens: 64 → 16`.

Comparisons warn with it; the report decides with it which runs are points of one sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DIFFERENCES = 6
MAX_CHARS = 60  # of one side of a difference
_ABSENT = object()
_OF_ONE_RUN = frozenset({"salt", "seed", "speed_up"})


def work_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The workload's settings that do not change from run to run of one load test."""
    workload = result.get("workload")
    if not isinstance(workload, Mapping):
        return {}
    return {key: value for key, value in workload.items() if not _is_of_one_run(str(key))}


def differences(one: Any, other: Any) -> list[str]:
    """`path: one → other` for each path at which they differ; for single values without a path."""
    left, right = _flat(one), _flat(other)
    told = []
    for path in dict.fromkeys([*left, *right]):
        ours, theirs = left.get(path, _ABSENT), right.get(path, _ABSENT)
        if ours != theirs:
            both = " → ".join(_pair(_text(ours), _text(theirs)))
            told.append(f"{path}: {both}" if path else both)
    return told


def in_words(told: list[str]) -> str:
    """At most `MAX_DIFFERENCES` of them, and how many more there are."""
    rest = len(told) - MAX_DIFFERENCES
    more = [f"and {rest} more"] if rest > 0 else []
    return ", ".join([*told[:MAX_DIFFERENCES], *more])


def _is_of_one_run(key: str) -> bool:
    is_count = key.startswith(("num_", "total_")) and key != "num_groups"
    return is_count or key in _OF_ONE_RUN


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and (value or not path):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flat(item, f"{path}.{key}" if path else str(key))
        return flat
    return {path: value}


def _text(value: Any) -> str:
    return "none" if value is None or value is _ABSENT else str(value)


def _pair(one: str, other: str) -> tuple[str, str]:
    """Both cut to `MAX_CHARS`, around the first character in which they differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    start = max(0, same - MAX_CHARS // 2) if max(len(one), len(other)) > MAX_CHARS else 0
    return _cut(one, start), _cut(other, start)


def _cut(text: str, start: int) -> str:
    end = start + MAX_CHARS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
