"""Whether the page may be believed: validity of runs, of a search's answers, and what is no sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.goodput.doubts import invalid_ends, unanswered
from bench.load.report.scales import duration, quantity
from bench.load.report.svg import Markup, join, tag
from bench.load.report.targets import unlike
from bench.load.report.values import (
    ReportRun,
    ReportSearch,
    is_complete,
    num_unsent,
    number,
    sequence,
)

MAX_CAUTIONS = 6  # of a search's many probes


def banner(runs: Sequence[ReportRun], names: Sequence[str], searches: Sequence[ReportSearch] = ()) -> Markup:
    """INVALID with every reason, or unknown: of any run or search on the page. Only where all is well: valid,
    with the client's own figures. A search's probes are judged by what its answers rest on.
    """
    named = list(zip(names, runs, strict=True))
    own = [(name, run) for name, run in named if not run.is_probe]
    parts = [*_run_doubts(own), *_search_doubts(searches)]
    if runs and not parts:
        believed = [run for run in runs if run.result.get("valid") is not False]
        parts.append(_box("good", f"Valid. {_client_words(believed)}", []))
    parts += _unused_probes(searches)
    if (how := unlike([run for _, run in own])) is not None:
        why = f"They differ in {how}. No line joins them, and their figures are not of the same work."
        parts.append(_box("warn", "These runs are not one sweep.", [why]))
    if notes := [text for name, run in own for text in _told(name, run, "notes")]:
        parts.append(_box("warn", "Notes", notes))
    if cautions := _cautions(named):
        parts.append(_box("warn", "Caution", cautions))
    return join(parts)


def _run_doubts(named: Sequence[tuple[str, ReportRun]]) -> list[Markup]:
    num = len(named)
    has_names = num > 1 or any(run.called is not None for _, run in named)
    invalid = [(name, run.result) for name, run in named if run.result.get("valid") is False]
    unknown = [name for name, run in named if not isinstance(run.result.get("valid"), bool)]
    incomplete = [(name, run.result) for name, run in named if not is_complete(run)]
    parts = []
    if invalid:
        of = f" ({len(invalid)} of {num} runs)" if num > 1 else ""
        reasons = [f"{n}: {_reasons(result)}" if has_names else _reasons(result) for n, result in invalid]
        parts.append(_box("bad", f"INVALID{of}: these figures do not describe the server.", reasons))
    if incomplete:
        of = f" ({len(incomplete)} of {num} runs)" if num > 1 else ""
        reasons = [f"{n}: {_cut_short(r)}" if has_names else _cut_short(r) for n, r in incomplete]
        parts.append(_box("bad", f"INCOMPLETE{of}: these figures are of a part of the load.", reasons))
    if unknown:
        which = f": {', '.join(unknown)}" if has_names else ""
        why = "The result file does not say whether the client kept up."
        parts.append(_box("warn", f"Validity unknown{which}", [why]))
    return parts


def _search_doubts(searches: Sequence[ReportSearch]) -> list[Markup]:
    """An answer is only as good as the probes that it rests on; others that were invalid do not touch it."""
    parts = []
    if used := [f"{search.name}: {text}" for search in searches for text in invalid_ends(search.outcome)]:
        title = "INVALID: an answer rests on probes that the client could not offer; the server may do more."
        parts.append(_box("bad", title, used))
    if unfinished := [text for search in searches for text in _unfinished(search)]:
        title = "INCOMPLETE: an answer is missing, or is what the search knew so far."
        parts.append(_box("bad", title, unfinished))
    return parts


def search_doubt(search: ReportSearch) -> str | None:
    """For the page's title."""
    if invalid_ends(search.outcome):
        return "INVALID search"
    return "INCOMPLETE search" if _unfinished(search) else None


def _unused_probes(searches: Sequence[ReportSearch]) -> list[Markup]:
    sound = [search for search in searches if not invalid_ends(search.outcome)]
    num = sum(probe.get("valid") is False for search in sound for probe in _probes(search))
    were = "1 probe was" if num == 1 else f"{num} probes were"
    return [_box("warn", f"{were} invalid. No answer rests on it.", [])] if num else []


def _cautions(named: Sequence[tuple[str, ReportRun]]) -> list[str]:
    """All of the runs, and the first few of a search's many probes."""
    own = [text for name, run in named if not run.is_probe for text in _told(name, run, "cautions")]
    probes = [text for name, run in named if run.is_probe for text in _told(name, run, "cautions")]
    rest = len(probes) - MAX_CAUTIONS
    more = [f"and {rest} more, in the results of the probes"] if rest > 0 else []
    return [*own, *probes[:MAX_CAUTIONS], *more]


def _unfinished(search: ReportSearch) -> list[str]:
    """Why it was cut short, if it was; else the targets without an answer."""
    if search.outcome.get("is_complete") is False:
        why = " ".join(str(reason) for reason in sequence(search.outcome, "incomplete_reasons"))
        return [f"{search.name}: the search was cut short. {why}".rstrip()]
    targets = ", ".join(f"{target:.0%}" for target in unanswered(search.outcome))
    return [f"{search.name}: no answer yet at {targets}; what ended it stands below."] if targets else []


def _probes(search: ReportSearch) -> list[Mapping[str, Any]]:
    return [probe for probe in sequence(search.outcome, "probes") if isinstance(probe, Mapping)]


def _told(name: str, run: ReportRun, key: str) -> list[str]:
    return [f"{name}: {text}" for text in dict.fromkeys(map(str, sequence(run.result, key)))]


def _cut_short(result: Mapping[str, Any]) -> str:
    unsent = num_unsent(result)
    offered = number(result, "num_prompts") or 0.0
    some = f": {unsent:,} of {offered:,.0f} requests were never sent" if unsent else ""
    return f"The run ended before everything planned was offered{some}."


def _reasons(result: Mapping[str, Any]) -> str:
    reasons = [str(reason) for reason in sequence(result, "invalid_reasons")]
    return " ".join(reasons) or "The result file gives no reason."


def _client_words(runs: Sequence[ReportRun]) -> str:
    lags = [lag for run in runs if (lag := number(run.result, "send_lag_ms", "p99")) is not None]
    cpus = [cpu for run in runs if (cpu := number(run.result, "client_cpu_pct")) is not None]
    parts = [f"send lag p99 {duration(max(lags) / 1e3)}"] if lags else []
    parts += [f"busiest client process {quantity(max(cpus))} % of a core"] if cpus else []
    return f"The client kept up: {', '.join(parts)}." if parts else "The client kept up."


def _box(css: str, title: str, items: Sequence[str]) -> Markup:
    entries = tag("ul", None, *(tag("li", None, item) for item in items)) if items else Markup("")
    role = "alert" if css == "bad" else "note"
    return tag("div", {"class": f"banner {css}", "role": role}, tag("strong", None, title), entries)
