"""Baton and its peers, measured side by side: `python -m bench.peers` (or `make bench-peers`).

1. Say which peers cannot run on this machine, make the others ready.
2. Rounds, A/B/A/B: in each, every server in turn is started, warmed up, measured in closed loops and
   stopped, so that a machine that drifts drifts for all.
   A peer that is far behind in one round (`outcome.far_behind`) is left out of the later ones.
3. With a trace, the fastest server of each family is started once more and searched for its max goodput.
4. After every server the results so far are written: an interrupt loses one server's figures at most, and
   a later run can add its rounds to them (`earlier`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.load.runner import Measurement
from bench.machine import Machine
from bench.peers.limits import best_rates, most_tokens_per_s
from bench.peers.load import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TraceLoad,
    measure_closed_loop,
    search_goodput,
    warm_up,
)
from bench.peers.outcome import ClosedLoop, PeerOutcome, closed_loop_from_result, far_behind, fastest
from bench.peers.peer import Peer, Places, why_not
from bench.peers.prepare import CannotRun, prepare, versions
from bench.peers.record import Report
from bench.peers.server import PeerServer, Running
from bench.roofline import ModelShape

MOST_WARMUP_REQUESTS = 8
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared, and how."""

    places: Places
    cores: tuple[int, ...]
    num_rounds: int
    closed_loops: tuple[tuple[int, int], ...]  # (in flight, requests), in order
    trace: TraceLoad | None
    no_trace_reason: str | None
    goodput_names: frozenset[str]  # peers that are searched for max goodput; empty: each family's fastest
    earlier: Path | None  # results that this comparison adds to
    max_loop_s: float  # a closed loop that would take longer is left out, and said so
    out: Path  # without suffix: .json and .md are written


class Interrupted(Exception):
    """The user wants to stop: what was measured is written."""


def compare(comparison: Comparison, peers: Sequence[Peer], machine: Machine, tell: Tell) -> list[PeerOutcome]:
    """Measure all peers and write the results.

    Raises:
        Interrupted: after the results so far were written.
    """
    report = Report(comparison.out, comparison.earlier, _facts(comparison), dataclasses.asdict(machine))
    outcomes = {peer.name: report.outcome_of(_outcome(peer)) for peer in peers}
    isa = cpu_flags()
    for peer in peers:
        _make_ready(peer, outcomes[peer.name], comparison.places, isa, tell)
    shape = _model_shape(comparison.places)
    fastest_seen = best_rates(machine, report.machines)
    if shape is not None:
        loops = [concurrency for concurrency, _ in comparison.closed_loops]
        for peer in peers:
            outcomes[peer.name].limits_tok_per_s |= most_tokens_per_s(
                shape, peer, fastest_seen, loops, INPUT_TOKENS, OUTPUT_TOKENS
            )
    report.write()
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
    if comparison.num_rounds:
        _search(comparison, peers, outcomes, report, tell)
    return report.outcomes


@contextlib.contextmanager
def _recorded(outcome: PeerOutcome, report: Report, tell: Tell) -> Iterator[None]:
    """Whatever happens to this server, what was measured is written, and the others are measured."""
    try:
        yield
    except CannotRun as error:
        outcome.cannot_run = str(error)
        tell(f"  cannot run: {error}")
    finally:
        report.write()


def _search(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    report: Report,
    tell: Tell,
) -> None:
    """Max goodput of the chosen servers; the others say why they have none. What an earlier comparison
    found stays, unless the server is named again."""
    trace, named = comparison.trace, comparison.goodput_names
    families: dict[str, list[PeerOutcome]] = {}
    for peer in peers:
        families.setdefault(peer.family or peer.name, []).append(outcomes[peer.name])
    for peer in peers:
        outcome, best = outcomes[peer.name], fastest(families[peer.family or peer.name])
        if outcome.cannot_run is not None or not outcome.rounds:
            continue
        if outcome.goodput and (trace is None or peer.name not in named):
            continue
        if trace is None:
            outcome.goodput_note = comparison.no_trace_reason
        elif named and peer.name not in named:
            outcome.goodput_note = "not among the servers chosen for the search"
        elif not named and outcome is not best:
            outcome.goodput_note = f"not searched: {best.title if best else 'another'} is the faster one here"
        else:
            tell(f"max goodput: {peer.title}")
            with _recorded(outcome, report, tell), _serving(comparison, peer, outcome, "goodput") as running:
                rate = outcome.rounds[-1][-1].output_tok_per_s
                outcome.goodput, found = search_goodput(running, trace, rate, peer.name, tell)
                outcome.goodput_note = None
                report.keep_search(peer.name, found)
                if not found["is_complete"]:
                    raise Interrupted
    report.write()


def _facts(given: Comparison) -> dict[str, str]:
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()}",
        "Baton's commit": _commit(given.places.repository),
        "cores used by every server (and by the client beside it)": ", ".join(map(str, given.cores)),
        "model": given.places.model,
        "closed loop": f"{INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out, greedy; "
        f"{given.num_rounds} round(s), every server started anew in each",
    }
    if given.trace is not None:
        slos = ", ".join(f"{slo.metric.value} {slo.bound_s:g} s" for slo in given.trace.slos)
        facts["trace"] = (
            f"{given.trace.path.name}, lengths divided by {given.trace.scale:g}, "
            f"{given.trace.probe_s:g} s per probe, {len(given.trace.seeds)} seeds; SLOs: {slos}"
        )
    return facts


def _commit(repository: Path) -> str:
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
    return found.stdout.strip()


def cpu_flags() -> frozenset[str]:
    """The kernel's names of what this CPU can do."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _model_shape(places: Places) -> ModelShape | None:
    """Of the directory that the peers read; None: no peer needed it."""
    config = places.model_directory("bf16") / "config.json"
    return ModelShape.from_config(orjson.loads(config.read_bytes())) if config.is_file() else None


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
