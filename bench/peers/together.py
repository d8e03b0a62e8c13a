"""Closed loops of servers that all run at once, each resting while another is measured (`--together`).

A machine that others use too is slow for minutes at a time. Servers started one after the other are minutes
apart, so such a phase falls on some of them; here the loops of one load are seconds apart.

1. Every server is started and warmed up, in turn. A peer then rests: its processes are stopped (SIGSTOP), so
   that none of its threads spins. Baton is not stopped, since its processes watch one another's heartbeats;
   what it costs while idle is to the peers' disadvantage at most by that much, and said in the results.
2. Per round and per number in flight, each server in turn wakes, is measured, and rests. Every round begins
   with another server.
3. One that fails loses its later loops, and no other does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence

from bench.peers.comparison import Comparison
from bench.peers.one_server import Tell, measure_loop, recorded, serving
from bench.peers.outcome import ClosedLoop, PeerOutcome
from bench.peers.peer import Peer
from bench.peers.record import Report
from bench.peers.server import Running


def measure_together(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    report: Report,
    tell: Tell,
) -> None:
    """All rounds of closed loops."""
    with contextlib.ExitStack() as stack:
        standing: dict[str, Running] = {}
        for peer in peers:
            outcome = outcomes[peer.name]
            if outcome.cannot_run is None:
                tell(f"start: {peer.title}")
                with recorded(outcome, report, tell):
                    standing[peer.name] = stack.enter_context(_standing_by(comparison, peer, outcome))
        for number in range(comparison.num_rounds):
            tell(f"round {number + 1} of {comparison.num_rounds}")
            _round(comparison, peers, outcomes, standing, number, report, tell)


def _round(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    standing: dict[str, Running],
    number: int,
    report: Report,
    tell: Tell,
) -> None:
    runs: dict[str, list[ClosedLoop]] = {name: [] for name in standing}
    for name, of_round in runs.items():
        outcomes[name].rounds.append(of_round)
    for concurrency, num_requests in comparison.closed_loops:
        for peer in in_turn(peers, number):
            running = standing.get(peer.name)
            if running is None:
                continue
            outcome = outcomes[peer.name]
            is_done = False
            tell(f" {peer.title}")
            with recorded(outcome, report, tell), awake(peer, running.pid):
                measure_loop(
                    *(comparison, peer, outcome, running, runs[peer.name], concurrency, num_requests),
                    *(report, tell),
                )
                is_done = True
            if not is_done:
                del standing[peer.name]


def in_turn(peers: Sequence[Peer], number: int) -> list[Peer]:
    """The order of a round: who began the round before comes last."""
    first = number % len(peers)
    return [*peers[first:], *peers[:first]]


@contextlib.contextmanager
def _standing_by(comparison: Comparison, peer: Peer, outcome: PeerOutcome) -> Iterator[Running]:
    """A server that rests between its loops; awake again when it is to end."""
    with serving(comparison, peer, outcome, 0) as running:
        _rest(peer, running.pid)
        try:
            yield running
        finally:
            _wake(peer, running.pid)


@contextlib.contextmanager
def awake(peer: Peer, group: int) -> Iterator[None]:
    _wake(peer, group)
    try:
        yield
    finally:
        _rest(peer, group)


def _rest(peer: Peer, group: int) -> None:
    if not peer.is_baton:
        _signal(group, signal.SIGSTOP)


def _wake(peer: Peer, group: int) -> None:
    if not peer.is_baton:
        _signal(group, signal.SIGCONT)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, which its next loop will tell
        os.killpg(group, number)
