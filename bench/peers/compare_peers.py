"""Baton and its peers, measured side by side: `python -m bench.peers` (or `make bench-peers`).

1. Say which peers cannot run on this machine, make the others ready (`ready`).
2. Rounds, A/B/A/B: in each, every server in turn is started, warmed up, measured in closed loops and
   stopped, so that a machine that drifts drifts for all. Later rounds leave out what changes no ratio that
   matters (`searching.due_loops`).
3. With a trace, the fastest server of each family is searched for its max goodput, in its last round, while
   it runs anyway (a single round is followed by one of searches alone). The searches share the time
   (`budget_s`) that the loops, measured and still to come, leave (`searching`).
4. A server that does not start, dies, or stops answering loses what it was asked for, and no other does.
5. After every server the results so far are written: an interrupt loses one server's figures at most, and
   a later run can add its rounds to them (`earlier`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import msgspec

from bench.machine import Machine
from bench.peers.comparison import Comparison, Interrupted
from bench.peers.estimate import Estimate, affordable_probes, longest_search_s
from bench.peers.facts import chats_facts, cpu_flags, facts_of, model_shape, time_words
from bench.peers.limits import best_rates, limits
from bench.peers.load import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TraceLoad,
    estimate_of,
    search_goodput,
    trace_lengths,
)
from bench.peers.one_server import Loops, Tell, measure_peer, recorded, serving
from bench.peers.outcome import PeerOutcome
from bench.peers.peer import Peer, Places, why_not
from bench.peers.prepare import CannotRun, prepare, versions
from bench.peers.record import Report
from bench.peers.searching import due_loops, loops_s, one_seed_below, search_share, to_search
from bench.peers.server import Running
from bench.peers.together import measure_together
from cluster.errors import BatonError


def ready(comparison: Comparison, peers: Sequence[Peer], tell: Tell) -> dict[str, PeerOutcome]:
    """Make every peer ready that can run here: by name, the beginning of its outcome."""
    outcomes = {peer.name: _outcome(peer) for peer in peers}
    isa = cpu_flags()
    for peer in peers:
        _make_ready(peer, outcomes[peer.name], comparison.places, isa, tell)
    return outcomes


def compare(comparison: Comparison, peers: Sequence[Peer], machine: Machine, tell: Tell) -> list[PeerOutcome]:
    """Measure all peers and write the results.

    Raises:
        Interrupted: after the results so far were written.
    """
    started_s = time.monotonic()
    is_text, facts = comparison.chats is not None, facts_of(comparison)
    report = Report(comparison.out, comparison.earlier, facts, dataclasses.asdict(machine), is_text)
    try:
        _compare(comparison, peers, machine, report, started_s, tell)
    except (Interrupted, KeyboardInterrupt):
        if not (report.is_written and report.has_new_figures):
            raise Interrupted("interrupted before anything was measured; nothing is written") from None
        raise Interrupted(f"interrupted; what was measured is in {comparison.out}.json and .md") from None
    return report.outcomes


def _compare(
    comparison: Comparison,
    peers: Sequence[Peer],
    machine: Machine,
    report: Report,
    started_s: float,
    tell: Tell,
) -> None:
    outcomes = {name: report.outcome_of(one) for name, one in ready(comparison, peers, tell).items()}
    report.leave_out(comparison.not_chosen)
    if comparison.chats is not None:
        for name, text in chats_facts(
            comparison.chats, comparison.closed_loops, comparison.num_rounds
        ).items():
            report.tell(name, text)
    shape = model_shape(comparison.places)
    if shape is not None:
        report.tell("model", f"{comparison.model_title}; {shape.num_parameters / 1e6:.1f} M parameters")
        fastest_seen = best_rates(machine, report.machines)
        loops = [concurrency for concurrency, _ in comparison.closed_loops]
        for peer in peers:
            most, bound_by = limits(shape, peer, fastest_seen, loops, INPUT_TOKENS, OUTPUT_TOKENS)
            outcomes[peer.name].limits_tok_per_s |= most
            outcomes[peer.name].limits_bound_by |= bound_by
    num_rounds = comparison.num_rounds
    num_passes = num_rounds + (comparison.trace is not None and num_rounds < 2)  # the last has the searches
    if comparison.is_together:
        left_s = comparison.budget_s - (time.monotonic() - started_s)
        measure_together(comparison, peers, outcomes, report, tell, left_s)
    else:
        for number in range(num_passes):
            _round(comparison, peers, outcomes, number, number == num_passes - 1, report, started_s, tell)
    if comparison.trace is None:
        for name, reason in to_search(comparison, peers, outcomes, {})[1].items():
            outcomes[name].goodput_note = outcomes[name].goodput_note or reason
    report.tell("time", time_words(comparison, time.monotonic() - started_s))
    report.write()


def _round(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    number: int,
    is_last: bool,
    report: Report,
    started_s: float,
    tell: Tell,
) -> None:
    """Every server that is due in this round; in the last one, with the searches."""
    loops = dict.fromkeys((peer.name for peer in peers), comparison.closed_loops)
    if number >= comparison.num_rounds:
        loops = {}
    elif number:
        for peer in peers:
            loops[peer.name], once = due_loops(comparison, peer, peers, outcomes, number)
            outcomes[peer.name].once |= once
    searched: list[Peer] = []
    estimates: dict[str, Estimate] = {}
    if comparison.trace is not None and is_last:
        estimates = _estimates(comparison.trace, outcomes)
        promised = {name: one.start_rate for name, one in estimates.items()}
        searched, reasons = to_search(comparison, peers, outcomes, promised)
        for peer in peers:
            outcomes[peer.name].goodput_note = reasons.get(peer.name)
    names = {peer.name for peer in searched}
    due = [peer for peer in peers if loops.get(peer.name) and peer.name not in names]
    able = [peer for peer in (*searched, *due) if outcomes[peer.name].cannot_run is None]
    for position, peer in enumerate(able):
        outcome, own_loops = outcomes[peer.name], loops.get(peer.name, ())
        tell(_title(comparison, peer, own_loops, number))
        with recorded(outcome, report, tell), serving(comparison, peer, outcome, number) as running:
            if own_loops:
                measure_peer(comparison, peer, outcome, running, own_loops, number, report, tell)
            if peer.name in names:
                later = able[position + 1 :]
                reserved_s = sum(
                    loops_s(outcomes[one.name], loops.get(one.name, ()), OUTPUT_TOKENS) for one in later
                )
                left_s = comparison.budget_s - (time.monotonic() - started_s) - reserved_s
                waiting = [one for one in later if one.name in names]
                _search(comparison, peer, outcome, running, left_s, waiting, estimates, report, tell)


def _estimates(trace: TraceLoad, outcomes: Mapping[str, PeerOutcome]) -> dict[str, Estimate]:
    lengths = trace_lengths(trace)
    found = {name: estimate_of(outcome, trace, lengths) for name, outcome in outcomes.items()}
    return {name: one for name, one in found.items() if one is not None}


def _title(comparison: Comparison, peer: Peer, loops: Loops, number: int) -> str:
    if not loops:
        return f"search alone: {peer.title}"
    return f"round {number + 1} of {comparison.num_rounds}: {peer.title}"


def _search(
    comparison: Comparison,
    peer: Peer,
    outcome: PeerOutcome,
    running: Running,
    left_s: float,
    waiting: Sequence[Peer],
    estimates: Mapping[str, Estimate],
    report: Report,
    tell: Tell,
) -> None:
    """Max goodput of a running server. `waiting`: the servers that are searched after it."""
    trace = comparison.trace
    assert trace is not None, "without a trace none is chosen"
    share = search_share([peer, *waiting], {name: one.start_rate for name, one in estimates.items()})
    num_probes = affordable_probes(left_s, share, trace.probe_s, trace.max_probes)
    if not num_probes:
        outcome.goodput_note = f"not searched: the {comparison.budget_s / 60:.0f} minutes were over"
        tell(f"max goodput: {peer.title}: {outcome.goodput_note}")
        return
    max_s = longest_search_s(left_s, share, trace.probe_s)
    tell(f"max goodput: {peer.title}, at most {num_probes} probes")
    begun_s = time.monotonic()
    enough = one_seed_below(outcome, report.outcomes, min(trace.targets))
    try:
        outcome.goodput, found, is_interrupted = search_goodput(
            running, trace, estimates.get(peer.name), num_probes, max_s, enough, peer.name, tell
        )
    except BatonError as error:
        outcome.goodput_note = f"not searched: {error}"
        tell(f"  {outcome.goodput_note}")
        return
    outcome.took_s["search"] = round(time.monotonic() - begun_s, 1)
    report.keep_search(peer.name, found)
    if is_interrupted:
        raise Interrupted


def _outcome(peer: Peer) -> PeerOutcome:
    return PeerOutcome(
        name=peer.name,
        title=peer.title,
        precision=peer.precision,
        weight_bits=peer.weight_bits,
        kv_bits=peer.kv_bits,
        arithmetic_bits=msgspec.UNSET if peer.arithmetic_bits is None else peer.arithmetic_bits,
        is_baton=peer.is_baton,
        settings=dict(peer.settings),
    )


def _make_ready(peer: Peer, outcome: PeerOutcome, places: Places, isa: frozenset[str], tell: Tell) -> None:
    outcome.cannot_run = why_not(peer, isa)
    if outcome.cannot_run is None:
        try:
            prepare(peer, places, tell)
            outcome.versions = versions(peer)
        except CannotRun as error:
            outcome.cannot_run = str(error)
    if outcome.cannot_run is not None:
        tell(f"{peer.name} cannot run on this machine: {outcome.cannot_run}")
