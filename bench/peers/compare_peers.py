"""Baton and its peers, measured side by side: `python -m bench.peers` (or `make bench-peers`).

1. Say which peers cannot run on this machine, make the others ready (`ready`).
2. Rounds, A/B/A/B: in each, every server in turn is started, warmed up, measured in closed loops and
   stopped, so that a machine that drifts drifts for all.
   A peer that is far behind in one round (`outcome.far_behind`) is left out of the later ones.
3. With a trace, the fastest server of each family is started once more and searched for its max goodput. The
   searches share what the rounds left of the time (`budget_s`).
4. After every server the results so far are written: an interrupt loses one server's figures at most, and
   a later run can add its rounds to them (`earlier`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.load.runner import Measurement
from bench.machine import Machine
from bench.peers.comparison import Comparison, Interrupted
from bench.peers.estimate import affordable_probes
from bench.peers.facts import cpu_flags, facts_of, model_shape, time_words
from bench.peers.limits import best_rates, most_tokens_per_s
from bench.peers.load import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    measure_closed_loop,
    search_goodput,
    warm_up,
)
from bench.peers.outcome import (
    ClosedLoop,
    PeerOutcome,
    closed_loop_from_result,
    far_behind,
    fastest,
    mean_of,
)
from bench.peers.peer import Peer, Places, why_not
from bench.peers.prepare import CannotRun, prepare, versions
from bench.peers.record import Report
from bench.peers.server import PeerServer, Running
from cluster.errors import BatonError

MOST_WARMUP_REQUESTS = 8
Tell = Callable[[str], None]


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
    report = Report(comparison.out, comparison.earlier, facts_of(comparison), dataclasses.asdict(machine))
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
    shape = model_shape(comparison.places)
    if shape is not None:
        report.tell("model", f"{comparison.model_title}; {shape.num_parameters / 1e6:.1f} M parameters")
        fastest_seen = best_rates(machine, report.machines)
        loops = [concurrency for concurrency, _ in comparison.closed_loops]
        for peer in peers:
            outcomes[peer.name].limits_tok_per_s |= most_tokens_per_s(
                shape, peer, fastest_seen, loops, INPUT_TOKENS, OUTPUT_TOKENS
            )
    for number in range(comparison.num_rounds):
        for peer in peers:
            outcome = outcomes[peer.name]
            title = f"round {number + 1} of {comparison.num_rounds}: {peer.title}"
            if outcome.cannot_run is not None:
                continue
            if number and far_behind(outcome, report.outcomes):
                outcome.rounds_note = "no further round: less than half of the best peer's at every load"
                tell(f"{title}: {outcome.rounds_note}")
                continue
            tell(title)
            with _recorded(outcome, report, tell):
                _measure_peer(comparison, peer, outcome, number, report, tell)
    _search(comparison, peers, outcomes, report, started_s, tell)


@contextlib.contextmanager
def _recorded(outcome: PeerOutcome, report: Report, tell: Tell) -> Iterator[None]:
    """Whatever happens to this server, what was measured is written, and the others are measured."""
    try:
        yield
    except CannotRun as error:
        outcome.cannot_run = str(error)
        tell(f"  cannot run: {error}")
    except BaseException:
        if report.has_new_figures:  # else an earlier table stays as it is
            report.write()
        raise
    report.write()


def _search(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    report: Report,
    started_s: float,
    tell: Tell,
) -> None:
    """Max goodput of the chosen servers; the others say why they have none. What an earlier comparison
    found stays, unless the server is named again."""
    trace, named = comparison.trace, comparison.goodput_names
    chosen: list[Peer] = []
    for peer in peers:
        outcome = outcomes[peer.name]
        if outcome.cannot_run is not None or not outcome.rounds:
            continue
        if outcome.goodput and (trace is None or peer.name not in named):
            continue
        outcome.goodput_note = why_no_search(comparison, peer, peers, outcomes)
        if outcome.goodput_note is None:
            chosen.append(peer)
    for position, peer in enumerate(chosen):
        assert trace is not None, "without a trace none is chosen"
        outcome = outcomes[peer.name]
        left_s = comparison.budget_s - (time.monotonic() - started_s)
        num_probes = affordable_probes(left_s, len(chosen) - position, trace.probe_s, trace.max_probes)
        if not num_probes:
            outcome.goodput_note = f"not searched: the {comparison.budget_s / 60:.0f} minutes were over"
            tell(f"max goodput: {peer.title}: {outcome.goodput_note}")
            continue
        tell(f"max goodput: {peer.title}, at most {num_probes} probes")
        with _recorded(outcome, report, tell), _serving(comparison, peer, outcome, "goodput") as running:
            loops = (mean_of(outcome, concurrency) for concurrency in _loads(outcome))
            means = [mean for mean in loops if mean is not None]
            try:
                outcome.goodput, found, is_interrupted = search_goodput(
                    running, trace, means, num_probes, peer.name, tell
                )
            except BatonError as error:
                outcome.goodput_note = f"not searched: {error}"
                tell(f"  {outcome.goodput_note}")
                continue
            report.keep_search(peer.name, found)
            if is_interrupted:
                raise Interrupted
    report.tell("time", time_words(comparison, time.monotonic() - started_s))
    report.write()


def why_no_search(
    comparison: Comparison, peer: Peer, peers: Sequence[Peer], outcomes: Mapping[str, PeerOutcome]
) -> str | None:
    """None: this server is searched for its max goodput."""
    if comparison.trace is None:
        return comparison.no_trace_reason
    if comparison.goodput_names:
        is_named = peer.name in comparison.goodput_names
        return None if is_named else "not among the servers chosen for the search"
    family = [outcomes[other.name] for other in peers if _family(other) == _family(peer)]
    best = fastest(family)
    if outcomes[peer.name] is not best:
        return f"not searched: {best.title if best else 'another'} is the faster one here"
    if far_behind(outcomes[peer.name], list(outcomes.values())):
        return "not searched: less than half of the best peer's throughput at every load"
    return None


def _family(peer: Peer) -> str:
    return peer.family or peer.name


def _loads(outcome: PeerOutcome) -> list[int]:
    return sorted({run.concurrency for one in outcome.rounds for run in one})


def _outcome(peer: Peer) -> PeerOutcome:
    return PeerOutcome(
        name=peer.name,
        title=peer.title,
        precision=peer.precision,
        weight_bits=peer.weight_bits,
        kv_bits=peer.kv_bits,
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


def _measure_peer(
    comparison: Comparison, peer: Peer, outcome: PeerOutcome, round_number: int, report: Report, tell: Tell
) -> None:
    with _serving(comparison, peer, outcome, str(round_number + 1)) as running:
        runs: list[ClosedLoop] = []
        outcome.rounds.append(runs)
        for concurrency, num_requests in comparison.closed_loops:
            if runs and (reason := too_long(runs[-1], num_requests, comparison.max_loop_s)) is not None:
                outcome.skipped[concurrency] = reason
                tell(f"  {concurrency} in flight: {reason}")
                continue
            measurement = measure_closed_loop(running, concurrency, num_requests, peer.name, time.time_ns())
            report.keep(peer.name, measurement)
            _checked(measurement)
            runs.append(closed_loop_from_result(measurement.result))
            last = runs[-1]
            failed = f", {last.num_failed} failed" if last.num_failed else ""
            tell(
                f"  {concurrency} in flight: {last.output_tok_per_s:.1f} tok/s, "
                f"TTFT {last.ttft_p50_ms:.0f} ms, TPOT {last.tpot_p50_ms:.1f} ms{failed}"
            )


@contextlib.contextmanager
def _serving(comparison: Comparison, peer: Peer, outcome: PeerOutcome, what_for: str) -> Iterator[Running]:
    """The server, started and warmed up; stopped at the end."""
    log = comparison.places.logs / f"serve-{peer.name}-{what_for}.log"
    with PeerServer(peer, comparison.cores, log) as running:
        outcome.start_s.append(round(running.start_s, 1))
        most = max(concurrency for concurrency, _ in comparison.closed_loops)
        _checked(warm_up(running, min(most, MOST_WARMUP_REQUESTS), peer.name, time.time_ns()))
        yield running


def too_long(before: ClosedLoop, num_requests: int, max_loop_s: float) -> str | None:
    """Why a loop is not worth its time, judged by the throughput of the one before; None: it is."""
    if before.output_tok_per_s > 0:
        seconds = num_requests * OUTPUT_TOKENS / before.output_tok_per_s
        if seconds <= max_loop_s:
            return None
        return f"left out: it would take about {seconds:.0f} s at {before.output_tok_per_s:.1f} tok/s"
    return "left out: the loop before gave no tokens"


def _checked(measurement: Measurement) -> None:
    if not measurement.run.is_complete:
        raise Interrupted
