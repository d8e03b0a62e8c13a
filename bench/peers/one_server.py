"""One server of a comparison: started, warmed up, measured in closed loops; whatever happens to it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from bench.load.runner import Measurement
from bench.peers.chats import NUM_WARM_UP, numbers_of
from bench.peers.closed_loop import Prompts, measure_closed_loop, warm_up
from bench.peers.comparison import Comparison, Interrupted
from bench.peers.load import OUTPUT_TOKENS
from bench.peers.outcome import ClosedLoop, PeerOutcome, closed_loop_from_result
from bench.peers.peer import Peer
from bench.peers.record import Report
from bench.peers.server import PeerServer, Running
from cluster.errors import BatonError

Tell = Callable[[str], None]
Loops = tuple[tuple[int, int], ...]


@contextlib.contextmanager
def recorded(outcome: PeerOutcome, report: Report, tell: Tell) -> Iterator[None]:
    """Whatever happens to this server, what was measured is written, and the others are measured."""
    begun_s = time.monotonic()
    try:
        yield
    except (BatonError, OSError) as error:
        _take_failure(outcome, error, tell)
    except BaseException:
        if report.has_new_figures:  # else an earlier table stays as it is
            report.write()
        raise
    took_s = round(time.monotonic() - begun_s, 1)
    outcome.took_s["all"] = round(outcome.took_s.get("all", 0.0) + took_s, 1)
    report.write()


def _take_failure(outcome: PeerOutcome, error: Exception, tell: Tell) -> None:
    """A server without a figure cannot run; one that has some keeps them, and says what is missing."""
    if not any(outcome.rounds):
        outcome.cannot_run = str(error)
        tell(f"  cannot run: {error}")
        return
    outcome.rounds_note = f"its last start broke off: {error}"
    if not outcome.goodput and outcome.goodput_note is None:
        outcome.goodput_note = f"not searched: {error}"
    tell(f"  broken off: {error}")


@contextlib.contextmanager
def serving(comparison: Comparison, peer: Peer, outcome: PeerOutcome, number: int) -> Iterator[Running]:
    """The server, started and warmed up; stopped at the end."""
    log = comparison.places.logs / f"serve-{peer.name}-{number + 1}.log"
    with PeerServer(peer, comparison.cores, log) as running:
        outcome.start_s.append(round(running.start_s, 1))
        outcome.rounds_note = None  # of an earlier start that failed
        num = min(NUM_WARM_UP, max(concurrency for concurrency, _ in comparison.closed_loops))
        checked(warm_up(running, num, peer.name, time.time_ns(), _prompts(comparison, range(num))))
        yield running


def measure_peer(
    comparison: Comparison,
    peer: Peer,
    outcome: PeerOutcome,
    running: Running,
    loops: Loops,
    number: int,
    report: Report,
    tell: Tell,
) -> None:
    """One round of closed loops (from 0), with a running server."""
    runs: list[ClosedLoop] = []
    outcome.rounds.append(runs)
    for loop in loops:
        measure_loop(comparison, peer, outcome, running, runs, *loop, number, report, tell)


def measure_loop(
    comparison: Comparison,
    peer: Peer,
    outcome: PeerOutcome,
    running: Running,
    runs: list[ClosedLoop],
    concurrency: int,
    num_requests: int,
    number: int,
    report: Report,
    tell: Tell,
) -> None:
    """One closed loop of round `number`; `runs` are those of its round so far."""
    limit_s = comparison.max_loop_s
    if runs and (reason := too_long(runs[-1], concurrency, num_requests, limit_s)) is not None:
        outcome.skipped[concurrency] = reason
        tell(f"  {concurrency} in flight: {reason}")
        return
    prompts = _prompts(comparison, numbers_of(comparison.closed_loops, number, concurrency))
    begun_s = time.monotonic()
    measurement = measure_closed_loop(running, concurrency, num_requests, peer.name, time.time_ns(), prompts)
    report.keep(peer.name, measurement)
    checked(measurement)
    runs.append(closed_loop_from_result(measurement.result))
    last = runs[-1]
    failed = f", {last.num_failed} failed" if last.num_failed else ""
    tell(
        f"  {concurrency} in flight: {last.output_tok_per_s:.1f} tok/s, "
        f"TTFT {last.ttft_p50_ms:.0f} ms, TPOT {last.tpot_p50_ms:.1f} ms{failed}"
    )
    took_s = time.monotonic() - begun_s
    outcome.took_s["loops"] = round(outcome.took_s.get("loops", 0.0) + took_s, 1)


def _prompts(comparison: Comparison, numbers: range) -> Prompts | None:
    """The chats of these numbers; None: random ids."""
    chats = comparison.chats
    return None if chats is None else [chats.ids(number) for number in numbers]


def too_long(before: ClosedLoop, concurrency: int, num_requests: int, max_loop_s: float) -> str | None:
    """Why a loop is not worth its time; None: it is. A guess from the loop before, which had fewer in flight:
    throughput grows by the root of how many more there are."""
    if before.output_tok_per_s > 0:
        rate = before.output_tok_per_s * math.sqrt(concurrency / before.concurrency)
        seconds = num_requests * OUTPUT_TOKENS / rate
        if seconds <= max_loop_s:
            return None
        return f"left out: it would take about {seconds:.0f} s at {rate:.1f} tok/s"
    return "left out: the loop before gave no tokens"


def checked(measurement: Measurement) -> None:
    if not measurement.run.is_complete:
        raise Interrupted
