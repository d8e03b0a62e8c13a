"""Servers that run at once and take turns: who rests while another is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers import together
from bench.peers.comparison import Interrupted
from bench.peers.outcome import ClosedLoop, PeerOutcome
from bench.peers.peer import Peer
from bench.peers.server import Running
from bench.peers.together import in_turn, measure_together
from cluster.errors import BatonError


def peer(name: str) -> Peer:
    return Peer(
        name=name,
        title=name,
        precision="-",
        weight_bits=16,
        settings={},
        argv=(),
        model="m",
        is_baton=name == "baton",
    )


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Stage:
    """Servers are real processes that do nothing; loops note whose processes are stopped."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.played: list[tuple[str, int]] = []
        self.numbers: list[int] = []  # of the rounds they were in
        self.stopped: list[set[str]] = []  # per loop
        self.failing: tuple[str, int] | None = None
        self.ended: dict[str, str] = {}  # name |-> its state when it was to end
        self.probed: list[tuple[str, float]] = []  # name, rate that its search began at
        self.num_wanted = {"quick": 2}  # probes until a search is over; else 4
        self.failing_probe: tuple[str, int] | None = None
        self.interrupted: str | None = None

    @contextlib.contextmanager
    def serving(self, _: Any, one: Peer, outcome: PeerOutcome, number: int) -> Iterator[Running]:
        assert number == 0
        program = "import sys; sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True
        ) as process:
            self.pids[one.name] = process.pid
            running: Any = type("OneRunning", (), {"pid": process.pid})()
            try:
                yield running
            finally:
                self.ended[one.name] = state_of(process.pid)
                assert process.stdin is not None
                process.stdin.close()
                process.wait(30)

    def loop(self, _: Any, one: Peer, outcome: PeerOutcome, *rest: Any) -> None:
        _running, runs, concurrency, _num_requests, number, _report, _tell = rest
        self.played.append((one.name, concurrency))
        self.numbers.append(number)
        self.stopped.append({name for name, pid in self.pids.items() if stops(pid)})
        if self.failing == (one.name, concurrency):
            raise BatonError("no answer")
        runs.append(concurrency)


class Search:
    """As `ServerSearch`; `stage` notes its probes."""

    def __init__(self, stage: Stage, name: str, first_rate: float) -> None:
        self._stage, self._name, self._first_rate, self._num = stage, name, first_rate, 0

    @property
    def is_over(self) -> bool:
        return self._num >= self._stage.num_wanted.get(self._name, 4)

    @property
    def is_interrupted(self) -> bool:
        return self._stage.interrupted == self._name

    def step(self, ends_s: float) -> None:
        assert not self.is_over
        stage = self._stage
        stage.probed.append((self._name, self._first_rate))
        stage.stopped.append({name for name, pid in stage.pids.items() if stops(pid)})
        self._num += 1
        if stage.failing_probe == (self._name, self._num):
            raise BatonError("no answer")

    def account(self) -> dict[str, Any]:
        return {"answers": [], "notes": [], "probes": [], "num": self._num}


def stops(pid: int) -> bool:
    return state_of(pid) == "T"


class Signals:
    """Sends them, and returns when a process has stopped or goes on."""

    def killpg(self, group: int, number: signal.Signals) -> None:
        os.killpg(group, number)
        what = {signal.SIGSTOP: os.WSTOPPED, signal.SIGCONT: os.WCONTINUED}[number]
        os.waitid(os.P_PID, group, what)


class Report:
    has_new_figures = True

    def __init__(self) -> None:
        self.searches: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, str] = {}

    def tell(self, name: str, text: str) -> None:
        self.facts[name] = text

    def write(self) -> None: ...

    def keep_search(self, name: str, account: dict[str, Any]) -> None:
        self.searches[name] = account


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(together, "serving", made.serving)
    monkeypatch.setattr(together, "measure_loop", made.loop)
    monkeypatch.setattr(together, "os", Signals())

    def search(
        _running: Any, _trace: Any, _found: Any, num: int, below: float, name: str, *rest: Any
    ) -> Search:
        assert (num, below) == (6, 0.0)
        return Search(made, name, rest[1])

    def estimate_of(outcome: PeerOutcome, *_: Any) -> Any:
        rates = {"baton": 4.0, "quick": 3.0, "slow": 1.0}
        return type("Found", (), {"start_rate": rates[outcome.name]})()

    monkeypatch.setattr(together, "ServerSearch", search)
    monkeypatch.setattr(together, "estimate_of", estimate_of)
    monkeypatch.setattr(together, "trace_lengths", lambda _: None)
    return made


def run(
    stage: Stage,
    *names: str,
    num_rounds: int = 2,
    searched: frozenset[str] | None = None,
    left_s: float = 3600.0,
) -> tuple[dict[str, PeerOutcome], Report]:
    """`searched`: with a trace, and only these if there are any."""
    peers = [peer(name) for name in names]
    outcomes = {
        one.name: PeerOutcome(
            name=one.name,
            title=one.title,
            precision="-",
            weight_bits=16,
            kv_bits=16,
            is_baton=one.is_baton,
            settings={},
        )
        for one in peers
    }
    trace = None if searched is None else type("Trace", (), {"probe_s": 40.0, "max_probes": 6})()
    given = {"num_rounds": num_rounds, "closed_loops": ((1, 3), (8, 16)), "trace": trace}
    comparison: Any = type("Given", (), given | {"goodput_names": searched or frozenset()})()
    report: Any = Report()
    measure_together(comparison, peers, outcomes, report, lambda _: None, left_s)
    return outcomes, report


def test_all_take_turns_at_every_load_and_a_round_begins_with_another(stage: Stage) -> None:
    outcomes, _ = run(stage, "baton", "quick", "slow")
    first = [(name, load) for load in (1, 8) for name in ("baton", "quick", "slow")]
    second = [(name, load) for load in (1, 8) for name in ("quick", "slow", "baton")]
    assert stage.played == first + second
    assert stage.numbers == [0] * 6 + [1] * 6
    rounds: dict[str, list[list[ClosedLoop]]] = {name: one.rounds for name, one in outcomes.items()}
    assert rounds == {name: [[1, 8], [1, 8]] for name in ("baton", "quick", "slow")}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process states are read from /proc")
def test_peers_rest_while_another_is_measured_and_baton_does_not(stage: Stage) -> None:
    run(stage, "baton", "quick", "slow")
    awake = {"baton": {"quick", "slow"}, "quick": {"slow"}, "slow": {"quick"}}
    assert stage.stopped == [awake[name] for name, _ in stage.played]
    assert set(stage.ended) == {"baton", "quick", "slow"}
    assert "T" not in stage.ended.values()  # awake again, so that they can end


def test_one_that_fails_loses_its_later_loops_alone(stage: Stage) -> None:
    stage.failing = ("quick", 8)
    outcomes, _ = run(stage, "baton", "quick", "slow")
    assert [name for name, _ in stage.played].count("quick") == 2
    assert outcomes["quick"].rounds[0] == [1]
    assert "no answer" in (outcomes["quick"].rounds_note or "")
    assert [len(one) for one in outcomes["slow"].rounds] == [2, 2]


def test_the_order_goes_round() -> None:
    peers = [peer(name) for name in ("a", "b", "c")]
    assert [[one.name for one in in_turn(peers, number)] for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_searches_have_a_probe_per_turn_and_begin_at_one_rate(stage: Stage) -> None:
    _, report = run(stage, "baton", "quick", "slow", num_rounds=1, searched=frozenset())
    turns = ["baton", "quick", "slow", "quick", "slow", "baton", "slow", "baton", "baton", "slow"]
    assert stage.probed == [(name, 3.0) for name in turns]
    awake = {"baton": {"quick", "slow"}, "quick": {"slow"}, "slow": {"quick"}}
    if sys.platform.startswith("linux"):
        assert stage.stopped[-len(turns) :] == [awake[name] for name in turns]
    assert {name: one["num"] for name, one in report.searches.items()} == {"baton": 4, "quick": 2, "slow": 4}


def test_only_those_named_are_searched(stage: Stage) -> None:
    run(stage, "baton", "quick", "slow", num_rounds=1, searched=frozenset({"slow"}))
    assert [name for name, _ in stage.probed] == ["slow"] * 4


def test_a_further_round_without_time_for_it_is_left_out_and_said(stage: Stage) -> None:
    outcomes, report = run(stage, "baton", "quick", num_rounds=3, left_s=0.0)
    assert [len(one.rounds) for one in outcomes.values()] == [1, 1]
    assert report.facts == {"rounds": "1 of 3: there was no time for another one"}


def test_without_time_for_a_bracket_nobody_is_searched(stage: Stage) -> None:
    outcomes, _ = run(stage, "baton", num_rounds=1, searched=frozenset(), left_s=60.0)
    assert outcomes["baton"].goodput_note == "not searched: the time was over"
    assert not stage.probed


def test_a_probe_that_fails_costs_its_server_its_later_ones(stage: Stage) -> None:
    stage.failing_probe = ("slow", 2)
    outcomes, _ = run(stage, "baton", "quick", "slow", num_rounds=1, searched=frozenset())
    assert [name for name, _ in stage.probed].count("slow") == 2
    assert [name for name, _ in stage.probed].count("baton") == 4
    assert outcomes["slow"].goodput_note == "not searched: no answer"
    assert outcomes["slow"].rounds_note is None  # its loops are whole


def test_an_interrupt_ends_all_searches(stage: Stage) -> None:
    stage.interrupted = "quick"
    with pytest.raises(Interrupted):
        run(stage, "baton", "quick", "slow", num_rounds=1, searched=frozenset())
    assert [name for name, _ in stage.probed] == ["baton", "quick"]
