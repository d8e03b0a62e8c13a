"""The first screen: what was tested and how, and the figures that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from bench.load.records import Status
from bench.load.report.blocks import element, scrolling, tiles
from bench.load.report.scales import aligned, duration, quantity
from bench.load.report.svg import Markup, escape, join, tag
from bench.load.report.targets import unlike
from bench.load.report.values import (
    ReportRun,
    doubt,
    in_flight,
    load_name,
    mapping,
    num_failed,
    num_unsent,
    number,
    offered_rate,
    percentile,
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


def page_title(runs: Sequence[ReportRun], is_search: bool = False) -> str:
    """Says open or closed loop, how requests arrived, and the load; or that it is a search."""
    if is_search:
        kinds = dict.fromkeys(words(run.result, "arrival", "kind") or "" for run in runs)
        rates = [rate for run in runs if (rate := offered_rate(run.result)) is not None]
        parts = [ARRIVALS.get(kind, kind) for kind in kinds if kind]
        parts += [f"probes at {_span(rates)} req/s"] if rates else []
        return "Search for the highest good rate" + (f": {', '.join(parts)}" if parts else "")
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


def lead(runs: Sequence[ReportRun], num_probes: int = 0) -> str:
    """One line below the title: targets, number of runs and requests, dates. `num_probes` of the runs are a
    search's."""
    targets = list(dict.fromkeys(run.target for run in runs))
    counts = ((num_probes, "probe"), (len(runs) - num_probes, "run"))
    offered = sum(int(number(run.result, "num_prompts") or 0) for run in runs)
    dates = sorted(date_text(date) for run in runs if (date := words(run.result, "date")) is not None)
    alone = runs[0].called if len(runs) == 1 else None
    parts = [] if alone is None or alone in targets else [alone]
    parts += [
        " vs ".join(targets),
        *(f"{num} {what}{'' if num == 1 else 's'}" for num, what in counts if num),
    ]
    parts += [f"{offered:,} requests measured"] if offered else []
    parts += [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"] if dates else []
    return " · ".join(part for part in parts if part)


def date_text(date: str) -> str:
    """`20261128-013000` of a result file (UTC) as a person writes it; anything else stays as it is."""
    try:
        return datetime.strptime(date, "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return date


def headline(result: Mapping[str, Any]) -> Markup:
    """The figures of one run as tiles."""
    items: list[tuple[str, str, str]] = []
    share, goodput = number(result, "slo_attainment"), number(result, "request_goodput")
    offered, failed, unsent = number(result, "num_prompts"), num_failed(result), num_unsent(result)
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
    items += _cached_tile(result)
    if failed is not None:
        kinds = ", ".join(
            f"{value} {key}"
            for key, value in mapping(result, "failures").items()
            if value and key != Status.SKIPPED.value
        )
        items.append(
            ("Failed", quantity(failed), kinds or f"{quantity(number(result, 'completed') or 0)} completed")
        )
    if unsent:
        items.append(("Never sent", quantity(unsent), "an earlier turn failed, or the run was cut short"))
    return tiles(items)


def _cached_tile(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Where the server says that it found input tokens in its cache."""
    cached, total = number(result, "total_cached_tokens"), number(result, "total_input_tokens")
    if not cached or not total:
        return []
    sub = f"{quantity(cached)} of {quantity(total)} input tokens"
    return [("Cached input", quantity(cached / total * 100, "%"), sub)]


def _slos(result: Mapping[str, Any]) -> str:
    bounds = mapping(result, "slos_ms")
    parts = [f"{name} ≤ {duration(v / 1e3)}" for name in bounds if (v := number(bounds, name)) is not None]
    return ", ".join(parts) or "requests that met every SLO"


_FAILED, _UNSENT = "sent and failed", "never sent"  # counted from the file's failures
Column = tuple[str, str, str | None, float]  # header, key or metric, percent of a metric, factor

_COLUMNS: tuple[Column, ...] = (
    ("goodput req/s", "request_goodput", None, 1.0),
    ("in all SLOs %", "slo_attainment", None, 100.0),
    ("TTFT p50 ms", "ttft", "50", 1.0),
    ("TTFT p99 ms", "ttft", "99", 1.0),
    ("TPOT p50 ms", "tpot", "50", 1.0),
    ("TPOT p99 ms", "tpot", "99", 1.0),
    ("E2E p50 ms", "e2el", "50", 1.0),
    ("E2E p99 ms", "e2el", "99", 1.0),
    ("output tok/s", "output_throughput", None, 1.0),
    ("failed", _FAILED, None, 1.0),
    ("never sent", _UNSENT, None, 1.0),
)


def runs_table(runs: Sequence[ReportRun]) -> Markup:
    """One row per run. Where several targets did the same work at one load, each figure also stands as a
    ratio to the first target's at that load."""
    targets = list(dict.fromkeys(run.target for run in runs))
    has_targets = len(targets) > 1
    has_ratios = has_targets and unlike(runs) is None
    columns = [c for c in _COLUMNS if any(_cell(run.result, c) is not None for run in runs)]
    if not any(num_unsent(run.result) for run in runs):
        columns = [c for c in columns if c[1] != _UNSENT]
    figures = [_figures(runs, column, targets[0] if has_ratios else None) for column in columns]
    has_files = any(run.called is not None for run in runs)
    headers = [
        *(["run"] if has_files else []),
        *(["target"] if has_targets else []),
        "load",
        "seed",
        *(c[0] for c in columns),
        "valid",
    ]
    rows: list[Markup] = []
    for run, *cells in zip(runs, *figures, strict=True):
        seed, valid = number(run.result, "arrival", "seed"), run.result.get("valid")
        start = [*([run.called or "–"] if has_files else []), *([run.target] if has_targets else [])]
        start.append(load_name(run.result))
        start.append("–" if seed is None else f"{seed:.0f}")
        word = doubt(run)
        end = "NO" if valid is False else word or ("yes" if valid is True else "?")
        row = [tag("td", None, cell) for cell in (*start, *cells, end)]
        rows.append(tag("tr", {"class": None if word is None else "invalid"}, *row))
    head = tag("tr", None, *(tag("th", {"scope": "col"}, header) for header in headers))
    whole = tag("table", None, tag("thead", None, head), tag("tbody", None, *rows))
    note = f"Small figures: ratio to {targets[0]} at the same load (the mean over its seeds)."
    return element("div", "card", scrolling(whole), *([element("p", "mark", note)] if has_ratios else []))


def _cell(result: Mapping[str, Any], column: Column) -> float | None:
    _, key, percent, factor = column
    if key in (_FAILED, _UNSENT):
        count = num_failed(result) if key == _FAILED else num_unsent(result)
        return None if count is None else float(count)
    value = number(result, key) if percent is None else percentile(result, key, percent)
    return None if value is None else value * factor


def _figures(runs: Sequence[ReportRun], column: Column, first_target: str | None) -> list[Markup]:
    """A column of the table, each figure of another target with its ratio to the first one's, if that is
    given. A run that is invalid or incomplete has that word for a ratio, and none is to it."""
    values = [_cell(run.result, column) for run in runs]
    bases: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        if value is not None and run.target == first_target and doubt(run) is None:
            bases.setdefault(load_name(run.result), []).append(value)
    cells: list[Markup] = []
    for run, value, written in zip(runs, values, aligned(values), strict=True):
        base = bases.get(load_name(run.result))
        reference = fmean(base) if base and run.target != first_target else 0.0
        ratio = Markup("")
        if value is not None and reference > 0:
            ratio = element("span", "ratio", doubt(run) or f"×{value / reference:.2f}")
        cells.append(join([escape(written), ratio]))
    return cells
