"""What two results have in common: their settings flattened, and where those differ, named by path.

1. `work_of` takes from a result what was asked of the server: the settings of the workload without what every
   run draws anew (salt, seed) and what goes with its rate and length (speed-up, counts, totals).
2. `SAME` are the parts of a result in which comparable runs are equal, `OFFERED` those that were the plan's.
3. `differences` names each path at which two values differ, as `output.tokens: 64 → 16`.

Comparisons warn with it; the report decides with it which runs are points of one sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def value_at(result: Mapping[str, Any], path: str) -> Any:
    """Under a path of keys joined by dots; None where there is none."""
    value: Any = result
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _pick(value: Any, *keys: str) -> Any:
    return {key: value.get(key) for key in keys} if isinstance(value, Mapping) else value


def _window_rule(rule: Any) -> Any:
    """What was asked for, without the moments that came of it."""
    if not isinstance(rule, str):
        return rule
    return rule.partition(":")[0]  # also of a steady window, whose times follow from the run


# What has to be equal for two runs to be comparable: words for a warning, and where it stands in the result.
# Of these, what was offered: where it differs, a ratio says nothing of the server.
OFFERED = frozenset(
    {
        *("the model", "the endpoint", "the workload", "the trace", "the seeds", "the arrivals"),
        *("the number of requests", "the measured window"),
    }
)
SAME: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (
    ("the model", lambda result: result.get("model_id")),
    ("the endpoint", lambda result: result.get("endpoint")),
    ("the workload", work_of),
    ("the trace", lambda result: _pick(result.get("trace"), "sha256", "speedup", "num_rows")),
    (
        "the seeds",
        lambda result: {
            "arrivals": value_at(result, "arrival.seed"),
            "workload": value_at(result, "workload.seed"),
        },
    ),
    (
        "the arrivals",
        lambda result: _pick(result.get("arrival"), "kind", "rate", "burstiness", "closed_loop", "details"),
    ),
    ("the number of requests", lambda result: value_at(result, "window.num_run_offered")),
    ("the measured window", lambda result: _window_rule(value_at(result, "window.rule"))),
    ("the SLOs (ms)", lambda result: result.get("slos_ms")),
    ("the cores of the server", lambda result: result.get("num_cores")),
    ("the accelerators of the server", lambda result: result.get("num_accelerators")),
)


def offered_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What was offered to them that differs."""
    return [what for what, read in SAME if what in OFFERED and differences(read(one), read(other))]
