"""What a report is made of, and how it reads a result file.

A result file may be of an older version or of another tool that uses vLLM's keys, so every read says what it
found or None; a value of the wrong kind counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bench.load.records import RunRecord
from bench.load.report.scales import quantity
from bench.load.report.svg import Markup


@dataclass(frozen=True, slots=True)
class ReportRun:
    """One run: its result file's JSON object, and its requests if they are at hand.

    Runs of one `target` are points of one sweep. Its name is `target_name`, until `targets.tell_apart` has
    seen all runs of the page. The run itself is called by its label, else by its file, if it came from one.
    """

    result: Mapping[str, Any]
    records: RunRecord | None = None
    name: str | None = None
    is_probe: bool = False  # of a search on the same page, which says itself which probes its answers rest on
    file: str | None = None  # its name without `.json`

    @property
    def target(self) -> str:
        return target_name(self.result) if self.name is None else self.name

    @property
    def called(self) -> str | None:
        """None: it came from no file, and has its load for a name."""
        return None if self.file is None else words(self.result, "label") or self.file


@dataclass(frozen=True, slots=True)
class Table:
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words: what it shows, how to read it, and the same numbers as a table."""

    title: str
    note: str
    chart: Markup
    table: Table | None = None
    is_wide: bool = False
    doubt: str | None = None  # `doubts` of the runs that it is drawn from


@dataclass(frozen=True, slots=True)
class Omitted:
    """A chart that these runs have no data for, and why."""

    title: str
    reason: str


Block = Figure | Omitted


class Load(Enum):
    """What a sweep varies."""

    RATE = "offered rate (req/s)"
    IN_FLIGHT = "requests in flight (closed loop)"


def number(source: Mapping[str, Any], *keys: str) -> float | None:
    """The finite number under a path of keys."""
    value: Any = source
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def words(source: Mapping[str, Any], *keys: str) -> str | None:
    """The text under a path of keys; None where it is missing, empty or not text."""
    value: Any = source
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value if isinstance(value, str) and value else None


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = source.get(key)
    return value if isinstance(value, Mapping) else {}


def sequence(source: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = source.get(key)
    return value if isinstance(value, list | tuple) else ()


def percentile(result: Mapping[str, Any], metric: str, percent: str) -> float | None:
    """`p99_ttft_ms` and the like, in milliseconds; p50 is also called median."""
    value = number(result, f"p{percent}_{metric}_ms")
    return number(result, f"median_{metric}_ms") if value is None and percent == "50" else value


def in_flight(result: Mapping[str, Any]) -> int | None:
    """The fixed number of requests in flight; None: the run was open loop."""
    value = number(result, "arrival", "closed_loop")
    kind = words(result, "arrival", "kind")
    if value is None and kind in (None, "closed-loop"):
        value = number(result, "max_concurrency")
    return int(value) if value is not None and value > 0 else None


def offered_rate(result: Mapping[str, Any]) -> float | None:
    """Requests per second that were offered; None: no rate (burst, closed loop)."""
    if in_flight(result) is not None:
        return None
    rate = number(result, "arrival", "rate")
    rate = number(result, "request_rate") if rate is None else rate
    return rate if rate is not None and rate > 0 else None


def realised_rate(result: Mapping[str, Any]) -> float | None:
    """Requests per second that the plan really held, if the result says; Poisson arrivals stray from their
    nominal rate."""
    rate = number(result, "offered_request_rate")
    return rate if rate is not None and rate > 0 else None


def offered_load(result: Mapping[str, Any], load: Load) -> float | None:
    if load is Load.RATE:
        return offered_rate(result)
    held = in_flight(result)
    return None if held is None else float(held)


def num_unsent(result: Mapping[str, Any]) -> int:
    """Requests of the window that were never sent; they count as offered and as failed in the file."""
    return int(number(result, "failures", "skipped") or 0)


def num_failed(result: Mapping[str, Any]) -> int | None:
    """Requests that were sent and did not end OK."""
    value = number(result, "failed")
    return None if value is None else max(0, int(value) - num_unsent(result))


def attainment(result: Mapping[str, Any]) -> float | None:
    return number(result, "slo_attainment")


def is_valid(result: Mapping[str, Any]) -> bool:
    return result.get("valid") is not False


def is_complete(run: ReportRun) -> bool:
    return run.result.get("is_complete") is not False and (run.records is None or run.records.is_complete)


def doubt(run: ReportRun) -> str | None:
    """In a word, why figures of this run are not to be held against others; None: they may be."""
    if not is_valid(run.result):
        return "INVALID"
    return None if is_complete(run) else "INCOMPLETE"


def doubts(runs: Sequence[ReportRun]) -> str | None:
    """The mark of a chart that such runs are part of: `INVALID run`, `1 of 3 runs INVALID`."""
    found = [word for run in runs if (word := doubt(run)) is not None]
    if not found:
        return None
    if len(runs) == 1:
        return f"{found[0]} run"
    told = [f"{found.count(word)} of {len(runs)} runs {word}" for word in dict.fromkeys(found)]
    return ", ".join(told)


def common_slo(runs: Sequence[ReportRun], name: str) -> float | None:
    """A bound in ms, if all runs share it."""
    bounds = {number(run.result, "slos_ms", name) for run in runs}
    return next(iter(bounds)) if len(bounds) == 1 else None


def measured_span(result: Mapping[str, Any]) -> tuple[float, float] | None:
    """Start and end (s) of the window that was measured; None: the whole run."""
    start_s, end_s = number(result, "window", "start_s"), number(result, "window", "end_s")
    if start_s is None or end_s is None or mapping(result, "window").get("is_whole_run") is True:
        return None
    return (start_s, end_s) if start_s <= end_s else None


def target_name(result: Mapping[str, Any]) -> str:
    """What was tested, in one name: its label, else backend, model and where it served."""
    label = words(result, "label")
    if label is not None:
        return label
    url = words(result, "environment", "url")
    parts = [words(result, "backend"), words(result, "model_id"), url and url.rpartition("://")[2]]
    return " · ".join(part for part in parts if part) or "unnamed target"


def load_name(result: Mapping[str, Any]) -> str:
    held, rate = in_flight(result), offered_rate(result)
    if held is not None:
        return f"{held} in flight"
    return f"{quantity(rate)} req/s" if rate is not None else "all at once"


def run_names(runs: Sequence[ReportRun]) -> list[str]:
    """A name per run that tells it from the others: its label or file and load, else the load alone, with
    target and seed where those differ.
    """
    has_targets = len({run.target for run in runs}) > 1
    bases = []
    for run in runs:
        called = run.called or (run.target if has_targets else None)
        load = load_name(run.result)
        bases.append(load if called is None else f"{called} · {load}")
    names: list[str] = []
    for base, run in zip(bases, runs, strict=True):
        seed = number(run.result, "arrival", "seed")
        is_shared = bases.count(base) > 1 and seed is not None
        names.append(f"{base} · seed {seed:.0f}" if is_shared else base)
    return [
        f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


@dataclass(frozen=True, slots=True)
class ReportSearch:
    """A max-goodput search: where it was made, and `search.to_dict` of its end with what it was made of."""

    target: str
    outcome: Mapping[str, Any]
    file: str | None = None  # its name without `.json`

    @property
    def name(self) -> str:
        """Its label, else its file, else its backend, else where it was made."""
        backend = words(self.outcome, "backend")
        return words(self.outcome, "label") or self.file or backend or self.target
