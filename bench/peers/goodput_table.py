"""Max goodput as Markdown: the rule, the best peer, a row per server and target. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.peers.outcome import Goodput, PeerOutcome
from bench.peers.rows import row

RULE = (
    "**req/s** is the highest rate that passed (the share of all offered requests inside every SLO was at "
    "least the target), as the mean over the seeds whose search ended: where the highest rate that passed "
    "and the lowest that failed differ by no more than the tolerance (above, at `trace`), between which "
    "the true rate lies. **≥** is a lower bound: no seed ended, and it is the highest rate that had "
    "passed; or the seeds that were begun and did not end had all passed it already. A seed that did not "
    "end is otherwise in no figure; **seeds in it** says how many are, and which. **not found**: no rate "
    "that was tried passed, and lower ones were not tried before the search ended. Where even requests one "
    "at a time miss the target, no rate reaches it. **to best peer** is the ratio of two such figures, and "
    "no surer than their brackets: ≥ where the row is a lower bound, ≤ where the peer is, left out where "
    "both are; *at most* where the rates that failed (their mean over the seeds) are below the peer's "
    "figure already. A peer marked ≥ or `not found` may be better than it was shown to be. An interval "
    "needs three seeds that ended."
)
_HEAD = (
    "| server | target | req/s | each seed: passed – failed | seeds in it | 95 % interval | to best peer "
    "| notes |",
    "|---|---|---|---|---|---|---|---|",
)


def goodput_table(outcomes: Sequence[PeerOutcome]) -> list[str]:
    if not any(one.goodput for one in outcomes):
        reasons = dict.fromkeys(one.goodput_note for one in outcomes if one.goodput_note is not None)
        return [f"Not measured: {'; '.join(reasons) or 'it was not asked for'}."]
    targets = dict.fromkeys(own.target for one in outcomes for own in one.goodput)
    best = {target: best_goodput(outcomes, target) for target in targets}
    named = [f"at {target:.0%} {found[1]}" for target, found in best.items() if found is not None]
    rows = [RULE, "", f"Best peer: {', '.join(named) or 'none was found'}.", *_allowed(outcomes), "", *_HEAD]
    for one in outcomes:
        if not one.goodput:
            rows.append(row(one.title, *["–"] * 6, one.goodput_note or one.cannot_run or "not measured"))
        for own in one.goodput:
            found = best[own.target]
            rows.append(
                row(
                    one.title,
                    f"{own.target:.0%}",
                    _rate(own),
                    _brackets(own),
                    _counted(own),
                    "–" if own.ci_low is None else f"{own.ci_low:.3g}–{_bound(own.ci_high)}",
                    "–" if found is None else _against(own, found[0]),
                    "; ".join(own.notes),
                )
            )
    return rows


def best_goodput(outcomes: Sequence[PeerOutcome], target: float) -> tuple[Goodput, str] | None:
    """Of the peers, with its title; one without a rate is no yardstick."""
    found = [
        (own, outcome.title)
        for outcome in outcomes
        if not outcome.is_baton
        for own in outcome.goodput
        if own.target == target and own.requests_per_s
    ]
    return max(found, key=lambda pair: pair[0].requests_per_s or 0.0, default=None)


def ratio_text(own: Goodput, best: Goodput) -> str:
    """`1.18`, `≥ 1.18`, `≤ 1.18`; `–` where nothing follows."""
    if own.requests_per_s is None or not best.requests_per_s:
        return "–"
    if own.is_lower_bound and best.is_lower_bound and own is not best:
        return "–"
    mark = "≥ " if own.is_lower_bound else "≤ " if best.is_lower_bound else ""
    return f"{'' if own is best else mark}{own.requests_per_s / best.requests_per_s:.2f}"


def ceiling(own: Goodput) -> float | None:
    """What the figure cannot be above, by the rates that failed; None: a seed has not failed yet."""
    if not own.seeds:  # an older file has the highest failing rate alone
        return own.failed
    failed = [one.failed for one in own.seeds if one.failed is not None]
    return statistics.fmean(failed) if len(failed) == len(own.seeds) else None


def proven_loss(own: Goodput, best: Goodput) -> float | None:
    """The most that the ratio can be, where the search did not end, yet what failed is below the peer's."""
    is_open = own.requests_per_s is None or own.is_lower_bound
    top, theirs = ceiling(own), best.requests_per_s
    if own is best or not is_open or top is None or not theirs or top >= theirs:
        return None
    return top / theirs


def _against(own: Goodput, best: Goodput) -> str:
    """`≥ 0.53, at most 0.83 (2 – 3.16 against 3.79)`."""
    ratio, most = ratio_text(own, best), proven_loss(own, best)
    if most is None:
        return ratio
    passed = "none" if own.requests_per_s is None else f"{own.requests_per_s:.3g}"
    why = f"at most {most:.2f} ({passed} – {_bound(ceiling(own))} against {_bound(best.requests_per_s)})"
    return why if ratio == "–" else f"{ratio}, {why}"


def _allowed(outcomes: Sequence[PeerOutcome]) -> list[str]:
    """How many probes each search was allowed, where not all had the same."""
    most = {one.title: one.goodput[0].max_probes for one in outcomes if one.goodput}
    if len(set(most.values())) < 2:
        return []
    told = "; ".join(f"{title}: {'unknown' if num is None else num}" for title, num in most.items())
    return ["", f"Probes that each search was allowed, by the time that was left: {told}."]


def _counted(own: Goodput) -> str:
    """`1 (seed 0)`, `2 (seeds 0, 1)`."""
    seeds = [str(seed.seed) for seed in own.seeds if seed.is_counted]
    if not seeds:
        return "–" if not own.seeds else "none"
    return f"{len(seeds)} (seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)})"


def _brackets(found: Goodput) -> str:
    """`2.1 – 2.5; 1.9 – 2.2 (not ended)`; an older file has the ends over all seeds alone."""
    if found.seeds:
        return "; ".join(
            f"{'none' if one.passed is None else f'{one.passed:.3g}'} – {_bound(one.failed)}"
            f"{'' if one.is_converged else ' (not ended)'}"
            for one in found.seeds
        )
    return "–" if found.failed is None else f"{_bound(found.passed)} – {_bound(found.failed)}"


def _rate(found: Goodput) -> str:
    if found.requests_per_s is None:
        return "not found"
    if found.is_out_of_reach:
        return "0: not reachable at any rate"
    return f"{'≥ ' if found.is_lower_bound else ''}{found.requests_per_s:.3g}"


def _bound(value: float | None) -> str:
    return "open" if value is None else f"{value:.3g}"
