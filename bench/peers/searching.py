"""Which servers are searched for max goodput, in what order, and with how much of the time. Pure.

1. `to_search`: the fastest server of each family (or those that were named), the most promising peer first,
   for what it reaches says how much the others are worth; then the other peers, then Baton. What a server
   promises is the rate that its search would start from (`estimate`).
2. `search_share`: what a search gets of the time that is left. A peer that promises less than half of the
   best one needs few probes; Baton and the best peer need all seeds.
3. `one_seed_below`: a peer whose first seed ends below half of the best peer's answer is not searched with
   further seeds: its bracket is told. Baton always gets all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.peers.comparison import Comparison
from bench.peers.older_notes import faster_text
from bench.peers.outcome import PeerOutcome, fastest, highest_load, mean_of
from bench.peers.peer import Peer

FAR = 0.5  # of the best peer's: below it one seed is enough
FULL_WEIGHT, FAR_WEIGHT = 3.0, 1.0  # three seeds, or one


def to_search(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    promised: Mapping[str, float],
) -> tuple[list[Peer], dict[str, str]]:
    """In the order of searching; and by name, why another has no search. What an earlier comparison found
    stays, unless the server is named again: then it is in neither.
    """
    chosen: list[Peer] = []
    reasons: dict[str, str] = {}
    for peer in peers:
        outcome = outcomes[peer.name]
        if outcome.cannot_run is not None or not any(outcome.rounds):
            continue
        if outcome.goodput and (comparison.trace is None or peer.name not in comparison.goodput_names):
            continue
        reason = why_no_search(comparison, peer, peers, outcomes)
        if reason is None:
            chosen.append(peer)
        else:
            reasons[peer.name] = reason
    chosen.sort(key=lambda peer: (peer.is_baton, -promised.get(peer.name, 0.0)))
    return chosen, reasons


def why_no_search(
    comparison: Comparison, peer: Peer, peers: Sequence[Peer], outcomes: Mapping[str, PeerOutcome]
) -> str | None:
    """None: this server is searched for its max goodput."""
    if comparison.trace is None:
        return comparison.no_trace_reason
    if comparison.goodput_names:
        is_named = peer.name in comparison.goodput_names
        return None if is_named else "not among the servers chosen for the search"
    best = fastest_of_family(peer, peers, outcomes)
    if best is not None and best is not outcomes[peer.name]:
        return f"not searched: {why_faster(best, outcomes[peer.name])}"
    return None


def fastest_of_family(
    peer: Peer, peers: Sequence[Peer], outcomes: Mapping[str, PeerOutcome]
) -> PeerOutcome | None:
    return fastest([outcomes[other.name] for other in peers if _family(other) == _family(peer)])


def why_faster(best: PeerOutcome, outcome: PeerOutcome) -> str:
    """It was decided at the highest load, and may be otherwise at another."""
    load = highest_load([best, outcome])
    if load is None or mean_of(outcome, load) is None:
        return f"of its kind only {best.title} has a figure at {load} in flight"
    return faster_text(best.title, load)


def _family(peer: Peer) -> str:
    return peer.family or peer.name


def search_share(left: Sequence[Peer], promised: Mapping[str, float]) -> float:
    """Of the time that is left, for the first of the searches that are still to come."""
    best = max(promised.values(), default=0.0)  # of peers and of Baton: what all must be measured beside
    weights = [
        FULL_WEIGHT if peer.is_baton or promised.get(peer.name, 0.0) >= FAR * best else FAR_WEIGHT
        for peer in left
    ]
    return weights[0] / sum(weights)


def one_seed_below(outcome: PeerOutcome, outcomes: Sequence[PeerOutcome], target: float) -> float:
    """Requests per second; 0: all seeds are worth it."""
    if outcome.is_baton:
        return 0.0
    found = [
        own.requests_per_s
        for one in outcomes
        if not one.is_baton and one is not outcome
        for own in one.goodput
        if own.target == target and own.requests_per_s is not None
    ]
    return FAR * max(found, default=0.0)


def due_loops(
    comparison: Comparison,
    peer: Peer,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    number: int,
) -> tuple[tuple[tuple[int, int], ...], dict[int, str]]:
    """The closed loops of this server in round `number` (from 0), and by load why another is not measured
    once more. The first round has all; a further one those whose ratios matter.
    """
    if number == 0 or peer.is_baton:
        return comparison.closed_loops, {}
    loops = dict(comparison.closed_loops)
    outcome = outcomes[peer.name]
    best = fastest_of_family(peer, peers, outcomes)
    if best is not None and best is not outcome:
        return (), dict.fromkeys(loops, f"no further round: {why_faster(best, outcome)}")
    reasons: dict[int, str] = {}
    for concurrency in loops:
        if is_far_at(outcome, concurrency, list(outcomes.values())):
            reasons[concurrency] = "no further round: less than half of the best peer's"
    due = tuple(pair for pair in comparison.closed_loops if pair[0] not in reasons)
    return due, reasons


def is_far_at(outcome: PeerOutcome, concurrency: int, outcomes: Sequence[PeerOutcome]) -> bool:
    """Less than half of the best peer's throughput at this load, or not measured at it: another round would
    change no ratio that matters."""
    own = mean_of(outcome, concurrency)
    rivals = [mean_of(one, concurrency) for one in outcomes if not one.is_baton]
    best = max((one.output_tok_per_s for one in rivals if one is not None), default=0.0)
    return own is None or own.output_tok_per_s * 2 < best


def loops_s(outcome: PeerOutcome, loops: Sequence[tuple[int, int]], output_tokens: int) -> float:
    """About how long these closed loops will take, start and warm-up included, by what was measured."""
    total = max(outcome.start_s, default=30.0) + 15.0
    for concurrency, num_requests in loops:
        mean = mean_of(outcome, concurrency)
        if mean is not None and mean.output_tok_per_s > 0:
            total += num_requests * output_tokens / mean.output_tok_per_s
    return total
