"""A comparison as Markdown: tables of figures and ratios, losses, settings and versions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.peers.goodput_table import goodput_table
from bench.peers.losses import goodput_losses, losses
from bench.peers.outcome import FLOAT, AfterBurst, Mean, PeerOutcome, best_peer, invalid_runs, mean_of
from bench.peers.rows import row


def as_markdown(
    outcomes: Sequence[PeerOutcome],
    concurrencies: Sequence[int],
    parts: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]],
    not_measured: Mapping[str, str] | None = None,
) -> str:
    """`parts` are the runs of the comparison: facts such as date and workload, and the machine.
    `not_measured`: titles of servers that have no row, and why.
    """
    lines = ["# Peers, measured side by side"]
    for number, (facts, machine) in enumerate(parts, start=1):
        lines += ["", f"Run {number} of {len(parts)}:", ""] if len(parts) > 1 else [""]
        lines += [f"- {name}: {value}" for name, value in facts.items()]
        lines += [f"- {name.replace('_', ' ')}: {_value(value)}" for name, value in machine.items()]
    lines += _legend(outcomes) if concurrencies else []
    for concurrency in concurrencies:
        lines += ["", f"## {concurrency} in flight", "", *_closed_loop_table(outcomes, concurrency)]
    lines += ["", "## Max goodput", "", *goodput_table(outcomes)]
    lost = [*losses(outcomes, concurrencies), *goodput_losses(outcomes)]
    lines += ["", "## Where Baton loses", ""]
    lines += [f"- {sentence}" for sentence in lost] or ["Nowhere, among what was measured."]
    lines += ["", "## Not measured", ""]
    missing = [f"- {one.title}: {one.cannot_run}" for one in outcomes if one.cannot_run is not None]
    missing += [
        f"- {one.title}, max goodput: {one.goodput_note}"
        for one in outcomes
        if one.goodput_note is not None and one.cannot_run is None
    ]
    missing += [f"- {title}: {reason}" for title, reason in (not_measured or {}).items()]
    lines += missing or ["Nothing."]
    lines += _time_table(outcomes)
    lines += ["", "## Settings and versions", ""]
    for one in outcomes:
        told = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        lines += [f"### {one.title} (`{one.name}`)", "", f"- precision: {one.precision}"]
        lines += [f"- versions: {told}"] if told else []
        lines += [f"- {name}: {value}" for name, value in one.settings.items()]
        lines += (
            [f"- seconds to the first answer: {', '.join(f'{s:.1f}' for s in one.start_s)}"]
            if one.start_s
            else []
        )
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _time_table(outcomes: Sequence[PeerOutcome]) -> list[str]:
    """Where the time went, all runs of the comparison together; nothing where older files do not say."""
    timed = [one for one in outcomes if one.took_s]
    if not timed:
        return []
    parts = ("loops", "search", "all")
    rows = [
        row(one.title, *(f"{one.took_s[part]:.0f}" if part in one.took_s else "–" for part in parts))
        for one in timed
    ]
    head = ["| server | closed loops s | search s | with starts and stops s |", "|---|---|---|---|"]
    return ["", "## Where the time went", "", *head, *rows]


def _closed_loop_table(outcomes: Sequence[PeerOutcome], concurrency: int) -> list[str]:
    """Each server is held against the best peer of its own precision, and against the best of any."""
    best = best_peer(outcomes, concurrency)
    classes = dict.fromkeys(one.precision_class for one in outcomes)
    equals = {name: best_peer(outcomes, concurrency, name) for name in classes}
    named = [f"{name}: {found[0].title}" for name, found in equals.items() if found is not None]
    rows = [] if best is None else [f"Best peer of any precision: {best[0].title}; {'; '.join(named)}.", ""]
    means = [mean_of(one, concurrency) for one in outcomes]
    has_later = any(mean is not None and mean.after_burst is not None for mean in means)
    later_names = [f"{name}, after the first burst" for name in LATENCIES] if has_later else []
    columns = (
        *("server", "precision", "output tok/s (range)", "of its limit", "to best peer of its precision"),
        *("to best peer of any", *LATENCIES, *later_names, "requests", "notes"),
    )
    rows += [row(*columns), "|" + "---|" * len(columns)]
    for one, mean in zip(outcomes, means, strict=True):
        left_out = invalid_runs(one, concurrency)
        notes = [] if left_out is None else [left_out]
        if mean is None:
            reason = one.skipped.get(concurrency, "not measured")
            notes = notes or [reason if one.cannot_run is None else "cannot run on this machine"]
            rows.append(row(one.title, one.precision, *["–"] * (len(columns) - 3), "; ".join(notes)))
            continue
        notes += [f"{mean.num_failed} failed"] if mean.num_failed else []
        notes += [one.once[concurrency]] if concurrency in one.once else []
        notes += [one.rounds_note] if one.rounds_note is not None else []
        rate = mean.output_tok_per_s
        rows.append(
            row(
                one.title,
                one.precision,
                f"{rate:.1f} ({mean.lowest_tok_per_s:.1f}–{mean.highest_tok_per_s:.1f})",
                _share(one, concurrency, rate),
                _ratio_to(rate, equals[one.precision_class], one.precision_class),
                _ratio_to(rate, best, "any"),
                *_latencies(mean),
                *(_latencies(mean.after_burst) if later_names else ()),
                f"{mean.num_rounds} × {mean.num_requests}",
                "; ".join(notes),
            )
        )
    return rows


def _latencies(of: Mean | AfterBurst | None) -> tuple[str, str]:
    """Cells of `LATENCIES`."""
    if of is None:
        return "–", "–"
    return (
        f"{_ms(of.ttft_p50_ms)} / {_ms(of.ttft_p99_ms)}",
        f"{_ms(of.tpot_p50_ms)} / {_ms(of.tpot_p99_ms)}",
    )


def _ratio_to(rate: float, best: tuple[PeerOutcome, Mean] | None, among: str) -> str:
    """With what it is a ratio to; a class of Baton's alone has no peer to be held against."""
    if best is None:
        return f"– (no {among} peer)"
    return f"{_ratio(rate, best[1].output_tok_per_s)} ({among})"


def _ratio(value: float, best: float) -> str:
    return f"{value / best:.2f}" if best > 0 else "–"


def _share(outcome: PeerOutcome, concurrency: int, rate: float) -> str:
    """`83% (memory)`; older files do not say what binds."""
    limit = outcome.limits_tok_per_s.get(concurrency)
    if limit is None:
        return "–"
    binds = outcome.limits_bound_by.get(concurrency)
    words = [f"{rate / limit:.0%}", *([] if binds is None else [f"({binds})"])]
    if _is_of_another_arithmetic(outcome, concurrency):
        return f"{' '.join(words)} \\*"
    if rate > limit:
        words.append("above it: the machine was faster here than when its rates were measured")
    return " ".join(words)


def _has_no_limit(outcome: PeerOutcome, concurrency: int) -> bool:
    return mean_of(outcome, concurrency) is not None and concurrency not in outcome.limits_tok_per_s


def _is_of_another_arithmetic(outcome: PeerOutcome, concurrency: int) -> bool:
    """Whether its products may be in int8, and its limit takes floating point, or may do so."""
    bits = outcome.weight_bits if outcome.arithmetic_bits is msgspec.UNSET else outcome.arithmetic_bits
    return bits < 16 and outcome.limits_bound_by.get(concurrency) in (None, FLOAT)


LATENCIES = ("TTFT ms p50 / p99", "TPOT ms p50 / p99")
LIMIT = (
    "- **of its limit**: output tokens per second as a share of the most that the row's own format allows "
    "on this machine. Two things bind it, {which}. *Memory*: each decode step reads all weights once and "
    "the KV of all its tokens, at the best read rate measured (above). *Arithmetic*: two operations per "
    "parameter and token of prompt and answer, and attention, at the best rate measured: of fp32 for "
    "32-bit rows, of the best floating point for 16-bit rows, of int8 for rows of fewer bits, where those "
    "were measured (above); else of the best floating point for all. It lets both overlap entirely and "
    "knows no overhead."
)
NO_LIMIT = (
    "- A row without such a share would be bound by memory, and checks guesses at its next tokens: one "
    "reading of the weights may give it several."
)
ANOTHER_ARITHMETIC = (
    "- \\*: the share is of what memory and *floating-point* arithmetic allow, since no rate of int8 was "
    "measured here. A row of 8 bits or fewer may multiply in int8, twice as much per instruction as pairs "
    "of bf16 and four times as much as fp32: where arithmetic binds this is no limit for it, and it may "
    "pass 100 %."
)
PERCENTILES = (
    "- **p50 / p99** are means over the rounds of each round's percentile. A p99 of the 3 to 32 requests "
    "of a round is, in effect, their slowest one."
)
LONGER_PERCENTILES = (
    "- **p50 / p99** are means over the rounds of each round's percentile. A p99 of fewer than 100 requests "
    "is, in effect, their slowest one."
)
AFTER_THE_FIRST_BURST = (
    "- **after the first burst**: a loop of N in flight begins with N requests at once, whose prompts wait "
    "for one another: their first tokens are those of a burst. These columns leave the first N requests of "
    "each loop out; every later one took the place of one that had ended, while up to N - 1 others were in "
    "work. The output in tok/s and the columns without this name are over the whole loop, with its burst, "
    "and with its end, where places stay empty. All answers have the same length, so a server that lets "
    "requests begin together lets them end together, and the next ones are a burst again."
)


def _legend(outcomes: Sequence[PeerOutcome]) -> list[str]:
    """What the columns of the closed loops say, once."""
    limited = [(one, at) for one in outcomes for at in one.limits_tok_per_s]
    lines = ["", "## How to read the closed loops", ""]
    if limited:
        is_named = all(at in one.limits_bound_by for one, at in limited)
        lines.append(LIMIT.format(which="the cell names which" if is_named else "whichever is less"))
    if any(_has_no_limit(one, at) for one in outcomes for at in {load for _, load in limited}):
        lines.append(NO_LIMIT)
    if any(_is_of_another_arithmetic(*pair) for pair in limited):
        lines.append(ANOTHER_ARITHMETIC)
    if any(run.after_burst is not msgspec.UNSET for one in outcomes for runs in one.rounds for run in runs):
        return [*lines, LONGER_PERCENTILES, AFTER_THE_FIRST_BURST]
    return [*lines, PERCENTILES]


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
