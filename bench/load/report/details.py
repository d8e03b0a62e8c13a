"""The end of the page: what failed, what the runs were made of, and what the words mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.records import Status
from bench.load.report.blocks import element, table
from bench.load.report.scales import quantity
from bench.load.report.svg import Markup, join, tag
from bench.load.report.values import ReportRun, Table, sequence

MAX_ERRORS = 20
MAX_ERROR_CHARS = 300
MAX_VALUE_CHARS = 240
MAX_LIST = 8
MAX_SETTINGS = 150
_SECTIONS = (
    "label",
    "model_id",
    "tokenizer_id",
    "backend",
    "endpoint",
    "endpoint_type",
    "date",
    "schema_version",
    "arrival",
    "burstiness",
    "request_rate",
    "max_concurrency",
    "num_prompts",
    "workload",
    "trace",
    "slos_ms",
    "window",
    "duration",
    "wall_s",
    "send_lag_ms",
    "client_cpu_pct",
    "clients",
    "num_cores",
    "num_accelerators",
    "server",
    "environment",
)
WORDS = (
    (
        "Open loop",
        "Requests are sent at moments fixed beforehand, whether or not earlier ones were answered.",
    ),
    ("Closed loop", "A fixed number of requests is in flight; a slow server is asked less often."),
    ("TTFT", "First chunk with content − scheduled send time, so a late send counts against the figure."),
    ("TPOT", "(E2E − TTFT) ÷ (output tokens − 1); none for answers of at most one token."),
    ("ITL", "Gaps between successive chunks with content, pooled over requests."),
    ("Worst gap", "The longest of these gaps in one request."),
    ("E2E", "Last byte − scheduled send time."),
    (
        "Attainment",
        "Share of all offered requests, failed and unsent ones included, that ended OK inside the SLO.",
    ),
    (
        "Goodput",
        "Measured requests that ended OK inside every SLO, per second from the window's start to the last "
        "end of them all; output and throughput are over the same time.",
    ),
    (
        "Send lag",
        "Sent − scheduled; a run is invalid where its p99 is above 5 % of the TTFT SLO (10 ms without one).",
    ),
)


def error_table(run: ReportRun) -> Markup:
    """Failures by kind and message, most frequent first; then what was never sent, which is no failure of the
    server."""
    all_kinds = Counter(_errors(run))
    failed = Counter({kind: num for kind, num in all_kinds.items() if kind[0] != Status.SKIPPED.value})
    unsent = Counter({kind: num for kind, num in all_kinds.items() if kind[0] == Status.SKIPPED.value})
    parts = [_kinds_table(failed) if failed else element("p", "note", "No request that was sent failed.")]
    if unsent:
        parts += [tag("h3", None, f"Never sent: {sum(unsent.values()):,} requests"), _kinds_table(unsent)]
    return join(parts)


def _kinds_table(kinds: Counter[tuple[str, str, str]]) -> Markup:
    shown = kinds.most_common(MAX_ERRORS)
    rows = [
        [
            f"{count:,}",
            status,
            http,
            error if len(error) <= MAX_ERROR_CHARS else error[:MAX_ERROR_CHARS] + "…",
        ]
        for (status, http, error), count in shown
    ]
    rest = sum(kinds.values()) - sum(count for _, count in shown)
    if rest:
        rows.append([f"{rest:,}", "…", "", f"{len(kinds) - len(shown)} more kinds"])
    return element("div", "card", table(Table(["requests", "status", "HTTP", "error"], rows), "left"))


def _errors(run: ReportRun) -> dict[tuple[str, str, str], int]:
    """Of all offered requests, from the records; else those of the window, from the result file."""
    kinds: Counter[tuple[str, str, str]] = Counter()
    if run.records is not None:
        for record in run.records.records:
            if record.status is not Status.OK:
                kinds[record.status.value, str(record.http_status or ""), record.error or "no message"] += 1
        return kinds
    for entry in sequence(run.result, "error_counts"):
        count = entry.get("count") if isinstance(entry, Mapping) else None
        if isinstance(count, int) and count > 0:
            status, http = str(entry.get("status") or "failed"), str(entry.get("http_status") or "")
            kinds[status, http, str(entry.get("error") or "no message")] += count
    return kinds


def settings(runs: Sequence[ReportRun], names: Sequence[str]) -> Markup:
    """What all runs share as pairs, and what differs as one column per run."""
    flat = [_settings_of(run.result) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    shared = [key for key in keys if len({values.get(key) for values in flat}) == 1]
    differing = [key for key in keys if key not in set(shared)]
    parts: list[Markup] = []
    if shared:
        title = "In all runs" if len(runs) > 1 else ""
        rows = [[key, flat[0].get(key, "–")] for key in shared[:MAX_SETTINGS]]
        parts += [tag("h3", None, title)] if title else []
        parts.append(element("div", "card", table(Table(["setting", "value"], rows), "left pairs")))
    if differing:
        rows = [[key, *(values.get(key, "–") for values in flat)] for key in differing[:MAX_SETTINGS]]
        parts.append(tag("h3", None, "Different between runs"))
        parts.append(element("div", "card", table(Table(["setting", *names], rows), "left")))
    dropped = max(0, len(shared) - MAX_SETTINGS) + max(0, len(differing) - MAX_SETTINGS)
    if dropped:
        parts.append(element("p", "note", f"{dropped} more settings are in the result files."))
    return join(parts) if parts else element("p", "note", "The result files tell no settings.")


def _settings_of(result: Mapping[str, Any]) -> dict[str, str]:
    """What `environment` repeats of the result's own keys is told once."""
    flat = flatten({key: result[key] for key in _SECTIONS if key in result})
    prefix = "environment."
    return {
        key: value
        for key, value in flat.items()
        if not (key.startswith(prefix) and flat.get(key.removeprefix(prefix)) == value)
    }


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `outer.inner` → text; long lists and texts are cut, with their length."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{name}.") if item else {}
        elif item is not None and item != "":
            flat[name] = _value_text(item)
    return flat


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return quantity(value) if value != int(value if abs(value) < 1e15 else 0) else f"{value:g}"
    if isinstance(value, list | tuple):
        if len(value) > MAX_LIST:
            return f"{len(value):,} values"
        return _cut(", ".join(_item_text(item) for item in value))
    return _cut(str(value))


def _item_text(item: Any) -> str:
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in flatten(item).items()) + "}"
    return _value_text(item)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text):,} characters)"


def glossary() -> Markup:
    parts = [part for word, meaning in WORDS for part in (tag("dt", None, word), tag("dd", None, meaning))]
    return element("dl", "words", *parts)
