"""What max-goodput searches found: the answers with their confidence intervals, and every probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.report.blocks import tiles
from bench.load.report.frame import WIDE, Axis, Mark
from bench.load.report.scales import quantity
from bench.load.report.svg import Markup
from bench.load.report.values import Block, Figure, Omitted, ReportSearch, Table, number, sequence
from bench.load.report.xy import Dot, Series, xy_chart

TITLE = "Probes of the search"
Entry = Mapping[str, Any]


def search_tiles(searches: Sequence[ReportSearch]) -> Markup:
    """The headline: per target and share, the highest rate."""
    items: list[tuple[str, str, str]] = []
    for search in searches:
        for answer in _entries(search, "answers"):
            share, rate = number(answer, "target") or 0.0, number(answer, "rate") or 0.0
            name = f"≥ {quantity(share * 100, '%')} inside all SLOs"
            value = quantity(rate, "req/s") if rate > 0 else "no rate passed"
            if rate > 0 and answer.get("is_lower_bound") is True:
                value = f"≥ {value}"
            items.append((f"{search.name}: {name}" if len(searches) > 1 else name, value, _interval(answer)))
    return tiles(items)


def _interval(answer: Entry) -> str:
    """What was seen, how well the mean is known, and over how many seeds."""
    parts = []
    if (seen := _ends(answer, "bracket")) is not None:
        parts.append(f"{quantity(seen[0])} passed, {quantity(seen[1])} failed")
    if (known := _ends(answer, "ci")) is not None:
        parts.append(f"95 % interval {quantity(known[0])} to {quantity(known[1])}")
    num = len(sequence(answer, "seeds"))
    searched = number(answer, "num_seeds_searched")
    of = f"{searched:.0f} of " if searched is not None and searched < num else ""
    parts.append(f"{of}{num} seed{'' if num == 1 else 's'}")
    if answer.get("is_converged") is False:
        parts.append("not converged")
    return ", ".join(parts)


def _ends(answer: Entry, name: str) -> tuple[float, float] | None:
    """`ci` or `bracket` of an answer."""
    low, high = number(answer, f"{name}_low"), number(answer, f"{name}_high")
    return (low, high) if low is not None and high is not None and low <= high else None


def search_chart(searches: Sequence[ReportSearch]) -> Block:
    """Attainment of each probe over its rate; invalid probes have a series of their own."""
    series = [one for i, search in enumerate(searches) for one in _series(search, i)]
    if not series:
        return Omitted(TITLE, "no probe measured anything")
    answers = [(search, answer) for search in searches for answer in _entries(search, "answers")]
    shares = sorted({share for _, answer in answers if (share := number(answer, "target")) is not None})
    marks = [mark for search, answer in answers for mark in _marks(search, answer, len(searches) > 1)]
    reach = max((mark.to for mark in marks if mark.to is not None), default=None)
    chart = xy_chart(
        TITLE,
        series,
        Axis("offered rate (req/s)", lo=0.0, hi=reach),
        Axis("% of offered requests inside all SLOs", lo=0.0, hi=100.0),
        across=[Mark(share * 100, f"{quantity(share * 100)} %") for share in shares],
        upright=marks,
        is_label_low=True,
        width=WIDE,
        height=380,
    )
    notes = [str(note) for _, answer in answers for note in sequence(answer, "notes")]
    notes += [str(note) for search in searches for note in sequence(search.outcome, "notes")]
    note = (
        "One point per probe. Upright lines are the answers; a grey band is the 95 % interval of the mean "
        "over seeds, or from passing to failing rates where there is none. "
    )
    return Figure(TITLE, note + " ".join(dict.fromkeys(notes)), chart, _table(searches), is_wide=True)


def _entries(search: ReportSearch, key: str) -> list[Entry]:
    return [entry for entry in sequence(search.outcome, key) if isinstance(entry, Mapping)]


def _series(search: ReportSearch, colour: int) -> list[Series]:
    valid: list[Dot] = []
    invalid: list[Dot] = []
    for probe in _entries(search, "probes"):
        rate, share = number(probe, "rate"), number(probe, "attainment")
        if rate is None or share is None:
            continue
        is_valid = probe.get("valid") is not False
        tip = (
            f"{search.name}: {quantity(share * 100)} % good at {quantity(rate)} req/s, "
            f"seed {quantity(number(probe, 'seed') or 0)}{'' if is_valid else ', INVALID'}"
        )
        (valid if is_valid else invalid).append(Dot(rate, share * 100, tip))
    named = ((f"{search.name}, invalid", invalid, "muted", 5), (search.name, valid, colour, colour % 5))
    return [  # valid ones last, so upon the others
        Series(name, dots=sorted(dots, key=lambda d: (d.x, d.y)), colour=css, shape=shape)
        for name, dots, css, shape in named
        if dots
    ]


def _marks(search: ReportSearch, answer: Entry, is_named: bool) -> list[Mark]:
    rate, share = number(answer, "rate"), number(answer, "target") or 0.0
    span = _ends(answer, "ci") or _ends(answer, "bracket")
    marks = [Mark(span[0], "", to=span[1])] if span is not None else []
    if rate:
        name = f"{search.name}: " if is_named else ""
        marks.append(Mark(rate, f"{name}{quantity(rate)} at {quantity(share * 100)} %", css="ref knee"))
    return marks


def _table(searches: Sequence[ReportSearch]) -> Table:
    rows = [
        [
            search.name,
            *("–" if (value := number(probe, key)) is None else quantity(value) for key in ("rate", "seed")),
            "–" if (share := number(probe, "attainment")) is None else quantity(share * 100),
            *("–" if (value := number(probe, key)) is None else quantity(value) for key in ("num_offered",)),
            "NO" if probe.get("valid") is False else "yes",
        ]
        for search in searches
        for probe in _entries(search, "probes")
    ]
    return Table(["target", "rate (req/s)", "seed", "% good", "requests", "valid"], rows)
