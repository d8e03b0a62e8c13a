"""Where Baton loses: a sentence for each figure of its own that some peer beats. Pure.

Of the closed loops these are the throughput, and the median and p99 of TTFT and TPOT; each is held against
the best peer of any precision, so that a loss to a smaller format is a loss, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.load.results.compare import plain
from bench.peers.goodput_table import best_goodput, ceiling, proven_loss, ratio_text
from bench.peers.outcome import Goodput, Mean, PeerOutcome, mean_of

# field of `Mean`, what it is called, its unit, whether more is better
_COMPARED = (
    ("output_tok_per_s", "output", "tok/s", True),
    ("ttft_p50_ms", "median TTFT", "ms", False),
    ("ttft_p99_ms", "p99 of TTFT", "ms", False),
    ("tpot_p50_ms", "median TPOT", "ms", False),
    ("tpot_p99_ms", "p99 of TPOT", "ms", False),
)
_AFTER = "after_burst."
_COMPARED_AFTER = tuple(
    (_AFTER + field, f"{name} after the first burst", unit, is_more)
    for field, name, unit, is_more in _COMPARED[1:]
)


def losses(outcomes: Sequence[PeerOutcome], concurrencies: Sequence[int]) -> list[str]:
    """One sentence for each figure of Baton's that some peer beats; names the best peer and the ratio."""
    sentences = []
    for baton in (outcome for outcome in outcomes if outcome.is_baton):
        for concurrency in concurrencies:
            own = mean_of(baton, concurrency)
            if own is None:
                continue
            for field, name, unit, more_is_better in (*_COMPARED, *_COMPARED_AFTER):
                rivals = _figures(outcomes, concurrency, field)
                if not rivals:
                    continue
                theirs, title = (max if more_is_better else min)(rivals, key=lambda rival: rival[0])
                mine = _figure(own, field)
                if (mine < theirs) if more_is_better else (mine > theirs):
                    sentences.append(
                        f"{baton.title}, {concurrency} in flight: {name} of {plain(mine)} {unit} is "
                        f"{mine / theirs:.2f} times that of {title} ({plain(theirs)} {unit})."
                    )
    return sentences


def _figures(outcomes: Sequence[PeerOutcome], concurrency: int, field: str) -> list[tuple[float, str]]:
    """One figure of each peer that has it, with the peer's title."""
    means = [(mean_of(one, concurrency), one.title) for one in outcomes if not one.is_baton]
    found = [(_figure(mean, field), title) for mean, title in means if mean is not None]
    return [(value, title) for value, title in found if not math.isnan(value)]


def _figure(mean: Mean, field: str) -> float:
    """NaN: it does not exist."""
    of = mean.after_burst if field.startswith(_AFTER) else mean
    return math.nan if of is None else float(getattr(of, field.removeprefix(_AFTER)))


def goodput_losses(outcomes: Sequence[PeerOutcome]) -> list[str]:
    """The same for max goodput, per target. A lower bound is told as one: the loss may be smaller."""
    told = [
        (baton, _goodput_loss(own, *found))
        for baton in outcomes
        if baton.is_baton
        for own in baton.goodput
        if (found := best_goodput(outcomes, own.target)) is not None
    ]
    return [f"{baton.title}: {loss}." for baton, loss in told if loss is not None]


def _goodput_loss(own: Goodput, best: Goodput, title: str) -> str | None:
    theirs, target, most = _rate(best), f"{own.target:.0%}", proven_loss(own, best)
    but = "" if most is None else f"; {ceiling(own):.3g} req/s failed, so at most {most:.2f} times that"
    if own.requests_per_s is None:
        return f"of the rates probed none passed at {target}; {title} passed {theirs}{but}"
    if own.is_out_of_reach:
        return f"{target} is not reachable at any rate; {title} reaches {theirs}"
    if own.requests_per_s >= (best.requests_per_s or 0.0):
        return None
    ratio = ratio_text(own, best)
    times = "an unknown part" if ratio == "–" else f"{ratio} times that"
    return f"max goodput at {target} of {_rate(own)} is {times} of {title} ({theirs}){but}"


def _rate(found: Goodput) -> str:
    return f"{'at least ' if found.is_lower_bound else ''}{found.requests_per_s or 0.0:.3g} req/s"
