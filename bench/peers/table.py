"""A comparison as Markdown: tables of figures and ratios, losses, settings and versions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.peers.losses import goodput_losses, losses
from bench.peers.outcome import Goodput, Mean, PeerOutcome, best_peer, invalid_runs, mean_of


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
    for concurrency in concurrencies:
        lines += ["", f"## {concurrency} in flight", "", *_closed_loop_table(outcomes, concurrency)]
    lines += ["", "## Max goodput", "", *_goodput_table(outcomes)]
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
        _row(one.title, *(f"{one.took_s[part]:.0f}" if part in one.took_s else "–" for part in parts))
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
    rows += [
        "| server | precision | output tok/s (range) | of its limit | to best peer of its precision "
        "| to best peer of any | TTFT ms p50 / p99 | TPOT ms p50 / p99 | requests | notes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        mean, left_out = mean_of(one, concurrency), invalid_runs(one, concurrency)
        notes = [] if left_out is None else [left_out]
        if mean is None:
            reason = one.skipped.get(concurrency, "not measured")
            notes = notes or [reason if one.cannot_run is None else "cannot run on this machine"]
            rows.append(_row(one.title, one.precision, *["–"] * 7, "; ".join(notes)))
            continue
        notes += [f"{mean.num_failed} failed"] if mean.num_failed else []
        notes += [one.once[concurrency]] if concurrency in one.once else []
        notes += [one.rounds_note] if one.rounds_note is not None else []
        rate = mean.output_tok_per_s
        rows.append(
            _row(
                one.title,
                one.precision,
                f"{rate:.1f} ({mean.lowest_tok_per_s:.1f}–{mean.highest_tok_per_s:.1f})",
                _share(rate, one.limits_tok_per_s.get(concurrency)),
                _ratio_to(rate, equals[one.precision_class], one.precision_class),
                _ratio_to(rate, best, "any"),
                f"{_ms(mean.ttft_p50_ms)} / {_ms(mean.ttft_p99_ms)}",
                f"{_ms(mean.tpot_p50_ms)} / {_ms(mean.tpot_p99_ms)}",
                f"{mean.num_rounds} × {mean.num_requests}",
                "; ".join(notes),
            )
        )
    return rows


def _ratio_to(rate: float, best: tuple[PeerOutcome, Mean] | None, among: str) -> str:
    """With what it is a ratio to; a class of Baton's alone has no peer to be held against."""
    if best is None:
        return f"– (no {among} peer)"
    return f"{_ratio(rate, best[1].output_tok_per_s)} ({among})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _goodput_table(outcomes: Sequence[PeerOutcome]) -> list[str]:
    if not any(one.goodput for one in outcomes):
        reasons = dict.fromkeys(one.goodput_note for one in outcomes if one.goodput_note is not None)
        return [f"Not measured: {'; '.join(reasons) or 'it was not asked for'}."]
    targets = dict.fromkeys(own.target for one in outcomes for own in one.goodput)
    best = {target: _best_goodput(outcomes, target) for target in targets}
    named = [f"at {target:.0%} {found[1]}" for target, found in best.items() if found is not None]
    rows = [
        "The highest rate that passed: the share of all offered requests inside every SLO was at least the "
        "target. A search has converged when the highest rate that passed and the lowest that failed differ "
        "by no more than the tolerance (above, at `trace`): the true rate lies between them. One that "
        "did not converge tells the highest rate that had passed when it stopped (≥): a lower bound, and so "
        "is its part in a ratio. Where even requests one at a time miss the target, no rate reaches it.",
        "",
        f"Best peer: {', '.join(named) or 'none was found'}.",
        "",
        "| server | target | req/s | each seed: passed – failed | seeds | 95 % interval "
        "| to best peer | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        if not one.goodput:
            reason = one.goodput_note or one.cannot_run or "not measured"
            rows.append(_row(one.title, *["–"] * 6, reason))
        for own in one.goodput:
            found = best[own.target]
            rows.append(
                _row(
                    one.title,
                    f"{own.target:.0%}",
                    _rate(own),
                    _brackets(own),
                    str(own.num_seeds or "–"),
                    "–" if own.ci_low is None else f"{own.ci_low:.3g}–{_bound(own.ci_high)}",
                    _ratio(own.requests_per_s, None if found is None else found[0]),
                    "; ".join([*([] if own.is_converged else ["not converged"]), *own.notes]),
                )
            )
    return rows


def _best_goodput(outcomes: Sequence[PeerOutcome], target: float) -> tuple[float, str] | None:
    found = [
        (own.requests_per_s, outcome.title)
        for outcome in outcomes
        if not outcome.is_baton
        for own in outcome.goodput
        if own.target == target and own.requests_per_s  # none found, or no rate: no yardstick
    ]
    return max(found, default=None)


def _brackets(found: Goodput) -> str:
    """`2.1 – 2.5; 1.9 – 2.2 (not converged)`; an older file has the ends over all seeds alone."""
    if found.seeds:
        return "; ".join(
            f"{'none' if one.passed is None else f'{one.passed:.3g}'} – {_bound(one.failed)}"
            f"{'' if one.is_converged else ' (not converged)'}"
            for one in found.seeds
        )
    return "–" if found.failed is None else f"{_bound(found.passed)} – {_bound(found.failed)}"


def _rate(found: Goodput) -> str:
    if found.requests_per_s is None:
        return "not found"
    if found.is_out_of_reach:
        return "0: not reachable at any rate"
    return f"{'' if found.is_converged else '≥ '}{found.requests_per_s:.3g}"


def _ratio(value: float | None, best: float | None) -> str:
    return "–" if value is None or best is None or not best > 0 else f"{value / best:.2f}"


def _share(value: float, limit: float | None) -> str:
    return "–" if limit is None else f"{value / limit:.0%}"


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _bound(value: float | None) -> str:
    return "open" if value is None else f"{value:.3g}"


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
