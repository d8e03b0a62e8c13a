"""The first screen: what was tested and how, whether it may be believed, and the figures that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.report.blocks import element, scrolling, tiles
from bench.load.report.scales import duration, quantity
from bench.load.report.svg import Markup, join, tag
from bench.load.report.values import (
    ReportRun,
    in_flight,
    load_name,
    mapping,
    number,
    offered_rate,
    percentile,
    sequence,
    target_name,
    words,
)

ARRIVALS = {
    "poisson": "Poisson arrivals",
    "gamma": "gamma arrivals",
    "constant": "constant arrivals",
    "ramp": "ramp of rates",
    "piecewise": "piecewise rates",
    "trace": "trace timestamps",
    "burst": "all requests at once",
}


def page_title(runs: Sequence[ReportRun]) -> str:
    """Says open or closed loop, how requests arrived, and the load."""
    results = [run.result for run in runs]
    held = [in_flight(result) for result in results]
    if not results:
        return "Load test: no runs"
    if all(one is not None for one in held):
        in_all = _span([float(one) for one in held if one is not None])
        return f"Load test, closed loop: {in_all} requests in flight"
    kinds = dict.fromkeys(
        words(r, "arrival", "kind") or "" for r, h in zip(results, held, strict=True) if h is None
    )
    arrivals = ", ".join(ARRIVALS.get(kind, kind) for kind in kinds if kind)
    loop = "open loop" if all(one is None for one in held) else "open and closed loop"
    rates = [rate for result in results if (rate := offered_rate(result)) is not None]
    load = f"{_span(rates)} req/s" if rates else ""
    return f"Load test, {loop}: " + (", ".join(part for part in (arrivals, load) if part) or "no rate")


def _span(values: Sequence[float]) -> str:
    lo, hi = min(values), max(values)
    return quantity(lo) if lo == hi else f"{quantity(lo)} to {quantity(hi)}"


def lead(runs: Sequence[ReportRun]) -> str:
    """One line below the title: targets, number of runs and requests, dates."""
    targets = list(dict.fromkeys(target_name(run.result) for run in runs))
    offered = sum(int(number(run.result, "num_prompts") or 0) for run in runs)
    dates = sorted(date for run in runs if (date := words(run.result, "date")) is not None)
    parts = [" vs ".join(targets), f"{len(runs)} runs" if len(runs) != 1 else "1 run"]
    parts += [f"{offered:,} requests measured"] if offered else []
    parts += [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"] if dates else []
    return " · ".join(part for part in parts if part)


def banner(runs: Sequence[ReportRun], names: Sequence[str]) -> Markup:
    """INVALID with every reason; or unknown; or valid, with the client's own figures."""
    invalid = [(n, r.result) for n, r in zip(names, runs, strict=True) if r.result.get("valid") is False]
    unknown = [n for n, r in zip(names, runs, strict=True) if not isinstance(r.result.get("valid"), bool)]
    incomplete = [n for n, r in zip(names, runs, strict=True) if not _is_complete(r)]
    notes = [
        f"{name}: {note}"
        for name, run in zip(names, runs, strict=True)
        for note in dict.fromkeys(
            str(note) for key in ("notes", "cautions") for note in sequence(run.result, key)
        )
    ]
    parts: list[Markup] = []
    if invalid:
        of = f" ({len(invalid)} of {len(runs)} runs)" if len(runs) > 1 else ""
        reasons = [f"{n}: {_reasons(result)}" if len(runs) > 1 else _reasons(result) for n, result in invalid]
        parts.append(_box("bad", f"INVALID{of}: these figures do not describe the server.", reasons))
    if incomplete:
        which = f": {', '.join(incomplete)}" if len(runs) > 1 else ""
        parts.append(
            _box("warn", f"INCOMPLETE{which}", ["The run ended before everything planned was offered."])
        )
    if unknown:
        which = f": {', '.join(unknown)}" if len(runs) > 1 else ""
        parts.append(
            _box(
                "warn",
                f"Validity unknown{which}",
                ["The result file does not say whether the client kept up."],
            )
        )
    if runs and not parts:
        parts.append(_box("good", f"Valid. {_client_words(runs)}", []))
    if notes:
        parts.append(_box("warn", "Notes", notes))
    return join(parts)


def _is_complete(run: ReportRun) -> bool:
    return run.result.get("is_complete") is not False and (run.records is None or run.records.is_complete)


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


def headline(result: Mapping[str, Any]) -> Markup:
    """The figures of one run as tiles."""
    items: list[tuple[str, str, str]] = []
    share, goodput = number(result, "slo_attainment"), number(result, "request_goodput")
    offered, failed = number(result, "num_prompts"), number(result, "failed")
    if goodput is not None:
        items.append(("Goodput", quantity(goodput, "req/s"), _slos(result)))
    if share is not None:
        items.append(
            ("Inside all SLOs", quantity(share * 100, "%"), f"of {quantity(offered or 0)} offered requests")
        )
    for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("gap", "Worst gap"), ("e2el", "End to end")):
        p50, p99 = percentile(result, metric, "50"), percentile(result, metric, "99")
        if p50 is not None:
            sub = f"median; p99 {duration(p99 / 1e3)}" if p99 is not None else "median"
            items.append((name, duration(p50 / 1e3), sub))
    if (tokens := number(result, "output_throughput")) is not None:
        total = number(result, "total_token_throughput")
        sub = f"{quantity(total)} with input tokens" if total is not None else "all requests together"
        items.append(("Output", quantity(tokens, "tok/s"), sub))
    if failed is not None:
        kinds = ", ".join(f"{value} {key}" for key, value in mapping(result, "failures").items() if value)
        items.append(
            ("Failed", quantity(failed), kinds or f"{quantity(number(result, 'completed') or 0)} completed")
        )
    return tiles(items)


def _slos(result: Mapping[str, Any]) -> str:
    bounds = mapping(result, "slos_ms")
    parts = [f"{name} ≤ {duration(v / 1e3)}" for name in bounds if (v := number(bounds, name)) is not None]
    return ", ".join(parts) or "requests that met every SLO"


_COLUMNS = (  # header, key, percent of a metric if it is one, factor, unit
    ("goodput req/s", "request_goodput", None, 1.0),
    ("in all SLOs %", "slo_attainment", None, 100.0),
    ("TTFT p50 ms", "ttft", "50", 1.0),
    ("TTFT p99 ms", "ttft", "99", 1.0),
    ("TPOT p50 ms", "tpot", "50", 1.0),
    ("TPOT p99 ms", "tpot", "99", 1.0),
    ("E2E p50 ms", "e2el", "50", 1.0),
    ("E2E p99 ms", "e2el", "99", 1.0),
    ("output tok/s", "output_throughput", None, 1.0),
    ("failed", "failed", None, 1.0),
)


def runs_table(runs: Sequence[ReportRun]) -> Markup:
    """One row per run. Where several targets ran at one load, each figure also stands as a ratio to the first
    target's at that load."""
    targets = list(dict.fromkeys(target_name(run.result) for run in runs))
    columns = [c for c in _COLUMNS if any(_cell(run.result, c) is not None for run in runs)]
    first_at: dict[str, ReportRun] = {}
    for run in runs:
        if target_name(run.result) == targets[0]:
            first_at.setdefault(load_name(run.result), run)
    headers = [*(["target"] if len(targets) > 1 else []), "load", "seed", *(c[0] for c in columns), "valid"]
    head = tag("tr", None, *(tag("th", {"scope": "col"}, header) for header in headers))
    rows: list[Markup] = []
    for run in runs:
        base = first_at.get(load_name(run.result)) if target_name(run.result) != targets[0] else None
        seed = number(run.result, "arrival", "seed")
        cells = [*([target_name(run.result)] if len(targets) > 1 else []), load_name(run.result)]
        cells.append("–" if seed is None else f"{seed:.0f}")
        cells += [_figure_with_ratio(run.result, base.result if base else None, c) for c in columns]
        valid = run.result.get("valid")
        cells.append({True: "yes", False: "NO"}.get(valid, "?") if isinstance(valid, bool) else "?")
        rows.append(tag("tr", None, *(tag("td", None, cell) for cell in cells)))
    whole = tag("table", None, tag("thead", None, head), tag("tbody", None, *rows))
    note = f"Small figures: ratio to {targets[0]} at the same load." if len(targets) > 1 else ""
    return element("div", "card", scrolling(whole), *([element("p", "mark", note)] if note else []))


Column = tuple[str, str, str | None, float]


def _cell(result: Mapping[str, Any], column: Column) -> float | None:
    _, key, percent, factor = column
    value = number(result, key) if percent is None else percentile(result, key, percent)
    return None if value is None else value * factor


def _figure_with_ratio(result: Mapping[str, Any], base: Mapping[str, Any] | None, column: Column) -> Markup:
    value = _cell(result, column)
    if value is None:
        return Markup("–")
    parts = [tag("span", {"class": "num"}, quantity(value))]
    reference = None if base is None else _cell(base, column)
    if reference:
        parts.append(element("span", "ratio", f"×{value / reference:.2f}"))
    return join(parts)
