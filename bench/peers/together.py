"""Servers that all run at once, each resting while another is measured (`--together`).

A machine that others use too is slow for minutes at a time. Servers started one after the other are minutes
apart, so such a phase falls on some of them; here the loops of one load are seconds apart, and so are the
probes of searches.

1. Every server is started and warmed up, in turn. A peer then rests: its processes are stopped (SIGSTOP), so
   that none of its threads spins. Baton is not stopped, since its processes watch one another's heartbeats;
   what it costs while idle is to the peers' disadvantage at most by that much, and said in the results.
2. Per round and per number in flight, each server in turn wakes, is measured, and rests. Every round begins
   with another server. A further round that the time has no room for is left out.
3. With a trace, each server's search for its max goodput (those named, else all) has one probe per turn. All
   begin at the same rate, the middle one of those they promise, and go on in the same steps, so that most
   probes of a turn offer the same load.
4. One that fails loses its later loops and probes, and no other does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

from bench.peers.comparison import Comparison, Interrupted
from bench.peers.estimate import MIN_PROBES, affordable_probes
from bench.peers.goodput import goodput_of
from bench.peers.load import ServerSearch, TraceLoad, estimate_of, trace_lengths
from bench.peers.one_server import Tell, measure_loop, recorded, serving
from bench.peers.outcome import ClosedLoop, PeerOutcome
from bench.peers.peer import Peer
from bench.peers.record import Report
from bench.peers.server import Running
from cluster.errors import BatonError


def measure_together(
    comparison: Comparison,
    peers: Sequence[Peer],
    outcomes: Mapping[str, PeerOutcome],
    report: Report,
    tell: Tell,
    left_s: float,
) -> None:
    """All rounds of closed loops, then the searches. `left_s`: of the budget."""
    ends_s = time.monotonic() + left_s
    with contextlib.ExitStack() as stack:
        together = _Together(comparison, outcomes, report, tell)
        for peer in peers:
            outcome = outcomes[peer.name]
            if outcome.cannot_run is None:
                tell(f"start: {peer.title}")
                with recorded(outcome, report, tell):
                    standing = stack.enter_context(_standing_by(comparison, peer, outcome))
                    together.standing[peer.name] = standing
        together.rounds(peers, ends_s)
        if comparison.trace is not None:
            together.search(comparison.trace, peers, ends_s)


class _Together:
    """Owns which servers stand by: those that have not failed."""

    def __init__(
        self, comparison: Comparison, outcomes: Mapping[str, PeerOutcome], report: Report, tell: Tell
    ) -> None:
        self.standing: dict[str, Running] = {}
        self._comparison, self._outcomes, self._report, self._tell = comparison, outcomes, report, tell

    def rounds(self, peers: Sequence[Peer], ends_s: float) -> None:
        """The first round in any case; a further one only if there is time for one as long as the longest."""
        longest_s, asked = 0.0, self._comparison.num_rounds
        for number in range(asked):
            begun_s = time.monotonic()
            if number and begun_s + longest_s > ends_s:
                self._report.tell("rounds", f"{number} of {asked}: there was no time for another one")
                return
            self._tell(f"round {number + 1} of {asked}")
            self.loops(peers, number)
            longest_s = max(longest_s, time.monotonic() - begun_s)

    def loops(self, peers: Sequence[Peer], number: int) -> None:
        """The closed loops of a round."""
        runs: dict[str, list[ClosedLoop]] = {name: [] for name in self.standing}
        for name, of_round in runs.items():
            self._outcomes[name].rounds.append(of_round)
        for load in self._comparison.closed_loops:
            for peer in in_turn(peers, number):
                if peer.name in self.standing:
                    with self._turn(peer) as (running, outcome):
                        measure_loop(
                            *(self._comparison, peer, outcome, running, runs[peer.name], *load),
                            *(number, self._report, self._tell),
                        )

    def search(self, trace: TraceLoad, peers: Sequence[Peer], ends_s: float) -> None:
        """One probe each, then the next, until every search is over or the time is."""
        named = self._comparison.goodput_names or self.standing
        peers = [peer for peer in peers if peer.name in named and peer.name in self.standing]
        if not peers:
            return
        left_s = ends_s - time.monotonic()
        num_probes = affordable_probes(left_s, 1 / len(peers), trace.probe_s, trace.max_probes)
        if not num_probes:
            for peer in peers:
                self._outcomes[peer.name].goodput_note = "not searched: the time was over"
            return
        lengths = trace_lengths(trace)
        found = {peer.name: estimate_of(self._outcomes[peer.name], trace, lengths) for peer in peers}
        promised = [one.start_rate for one in found.values() if one is not None]
        first_rate = round(statistics.median(promised), 3) if promised else None
        self._tell(f"max goodput, in turn: at most {num_probes} probes each")
        searches: dict[str, ServerSearch] = {}
        for number in range(num_probes):
            for peer in in_turn(peers, number):
                name = peer.name
                if name not in self.standing or (number and searches[name].is_over):
                    continue
                with self._turn(peer) as (running, outcome):
                    try:
                        if not number:
                            searches[name] = ServerSearch(
                                *(running, trace, found[name], num_probes, 0.0, name, self._tell), first_rate
                            )
                        self._probe(searches[name], outcome, ends_s)
                    except BatonError as error:  # of a first probe: no time for it, or too short a trace
                        outcome.goodput_note = f"not searched: {error}"
                        self._tell(f"  {outcome.goodput_note}")
                        del self.standing[name]

    def _probe(self, search: ServerSearch, outcome: PeerOutcome, ends_s: float) -> None:
        begun_s = time.monotonic()
        search.step(ends_s)
        account = search.account()
        if search.is_interrupted and outcome.goodput and len(account["probes"]) < MIN_PROBES:
            raise Interrupted  # an earlier, whole search stays
        outcome.goodput, outcome.goodput_note = goodput_of(account), None
        took_s = time.monotonic() - begun_s
        outcome.took_s["search"] = round(outcome.took_s.get("search", 0.0) + took_s, 1)
        self._report.keep_search(outcome.name, account)
        if search.is_interrupted:
            raise Interrupted

    @contextlib.contextmanager
    def _turn(self, peer: Peer) -> Iterator[tuple[Running, PeerOutcome]]:
        """It is awake, and measured inside; one that fails stands by no more."""
        running, outcome = self.standing[peer.name], self._outcomes[peer.name]
        is_done = False
        self._tell(f" {peer.title}")
        with recorded(outcome, self._report, self._tell), awake(peer, running.pid):
            yield running, outcome
            is_done = True
        if not is_done:
            del self.standing[peer.name]


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
