"""One self-contained HTML page from the results of one or several runs.

1. The first screen says what was tested, open or closed loop, whether to believe it, and the main figures.
   A run that is invalid or incomplete says so above all else, in the page's title, and at each of its charts.
2. Charts over load, if the runs are at several loads; the search for the highest good rate, if there was one.
3. Distributions, and per run: activity over time, timeline, lengths, errors.
4. Settings, environment and seeds; what every word means.

A chart without data is left out and the page says why. The page loads nothing: style, script and charts are
inline, and its content security policy allows nothing else. Caps on points, rows and runs bound its size.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from bench.load.report.banner import banner, search_doubt
from bench.load.report.blocks import charts, doubt_mark, element, fold, section
from bench.load.report.details import error_table, glossary, settings
from bench.load.report.distribution_charts import cdf_charts, evenly, length_charts
from bench.load.report.frame import Mark
from bench.load.report.overview import headline, lead, page_title, runs_table
from bench.load.report.search_charts import search_chart, search_tiles
from bench.load.report.style import CSS, SCRIPT
from bench.load.report.svg import Markup, join, tag
from bench.load.report.sweep_charts import sweep_charts
from bench.load.report.targets import by_load, tell_apart
from bench.load.report.time_charts import activity_charts
from bench.load.report.timeline import timeline_charts
from bench.load.report.turn_charts import turn_charts
from bench.load.report.values import (
    Block,
    Omitted,
    ReportRun,
    ReportSearch,
    doubts,
    measured_span,
    run_names,
)

MAX_DETAILED_RUNS = 12
MAX_ROWS_OF_MANY = 100  # of a timeline, where there are several runs


def render_report(runs: Sequence[ReportRun], searches: Sequence[ReportSearch] = ()) -> str:
    """The page as text, to be written as UTF-8. Equal input gives equal bytes."""
    runs = tell_apart(runs) if searches else by_load(tell_apart(runs))
    names = run_names(runs)
    title = page_title(runs, bool(searches))
    num_probes = sum(run.is_probe for run in runs)
    mark = doubts(
        [run for run in runs if not run.is_probe]
    )  # a search's charts tell its invalid probes apart
    sections: list[tuple[str, str, Markup]] = []
    if searches:
        found = join([search_tiles(searches), charts([search_chart(searches)])])
        sections.append(("search", "Highest good rate", found))
    if len(runs) > 1:
        kinds = [*(["Probes"] if num_probes else []), *(["Runs"] if num_probes < len(runs) else [])]
        sections.append(("runs", " and ".join(kinds).capitalize(), runs_table(runs)))
        sections.append(("load", "Over load", charts(sweep_charts(runs, has_knee=not searches), mark)))
    if runs:
        sections.append(("distributions", "Distributions", charts(cdf_charts(runs, names), mark)))
        sections += _per_run(runs, names)
        told = fold("All settings", settings(runs, names))
        sections.append(("settings", "Settings, environment, seeds", told))
    sections.append(("words", "What the words mean", glossary()))
    links = [tag("a", {"href": f"#{anchor}"}, name) for anchor, name, _ in sections]
    head = [
        tag("h1", None, title),
        banner(runs, names, searches),
        element("p", "lead", lead(runs, num_probes)) if runs else Markup(""),
        headline(runs[0].result) if len(runs) == 1 else Markup(""),
        tag("nav", {"aria-label": "Sections"}, *links),
    ]
    body = [
        tag("header", None, *head),
        tag("main", None, *(section(*one) for one in sections)),
        tag("footer", None, "Made by baton bench report. The page loads nothing from anywhere."),
    ]
    marks = [*([] if mark is None else [mark]), *dict.fromkeys(map(search_doubt, searches))]
    marked = ", ".join(word for word in marks if word is not None)
    return _document(f"{marked}: {title}" if marked else title, join(body))


def _per_run(runs: Sequence[ReportRun], names: Sequence[str]) -> list[tuple[str, str, Markup]]:
    """One run: its parts as sections. Several: one fold per run, evenly chosen where there are very many."""
    if len(runs) == 1:
        run, window, mark = runs[0], _window(runs[0]), doubts(runs)
        turns = [("turns", "Turns", charts(found, mark))] if (found := turn_charts(run)) else []
        over_time = [*activity_charts(run, window), *timeline_charts(run, window)]
        return [
            ("time", "Over time", charts(over_time, mark)),
            *turns,
            ("lengths", "Lengths", charts(_lengths(run), mark)),
            ("errors", "Errors", error_table(run)),
        ]
    chosen = evenly(list(zip(names, runs, strict=True)), MAX_DETAILED_RUNS)
    folds = [fold(name, *_all_of(run), css="run") for name, run in chosen]
    if len(chosen) < len(runs):
        folds.append(
            element("p", "note", f"{len(chosen)} of {len(runs)} runs are told in detail, evenly chosen.")
        )
    return [("each", "Each run", join(folds))]


def _all_of(run: ReportRun) -> list[Markup]:
    window = _window(run)
    blocks = [*activity_charts(run, window), *timeline_charts(run, window, MAX_ROWS_OF_MANY)]
    blocks += [*turn_charts(run), *_lengths(run)]
    mark = doubts([run])
    return [
        doubt_mark(mark),
        headline(run.result),
        tag("h3", None, "Charts"),
        charts(blocks, mark),
        tag("h3", None, "Errors"),
        error_table(run),
    ]


def _lengths(run: ReportRun) -> list[Block]:
    if run.records is None:
        return [Omitted("Input and output lengths", "no per-request records at hand")]
    return length_charts(run.records)


def _window(run: ReportRun) -> list[Mark]:
    """The measured part of the run, where it is not the whole."""
    span = measured_span(run.result)
    return [Mark(span[0], "measured window", to=span[1])] if span is not None else []


def _document(title: str, body: Markup) -> str:
    policy = f"default-src 'none'; style-src '{_digest(CSS)}'; script-src '{_digest(SCRIPT)}'"
    head = [
        Markup('<meta charset="utf-8">'),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", None, title),
        tag("style", None, Markup(CSS)),
    ]
    page = tag(
        "html",
        {"lang": "en"},
        tag("head", None, *head),
        tag("body", None, body, tag("script", None, Markup(SCRIPT))),
    )
    return f"<!doctype html>\n{page}\n"


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
