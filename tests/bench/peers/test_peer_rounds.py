"""The course of a comparison, without a server: rounds, searches, failures, and the time they share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.load.figures.slo import parse_slos
from bench.machine import Machine
from bench.peers import compare_peers
from bench.peers.__main__ import main as peers_main
from bench.peers.comparison import Comparison
from bench.peers.load import TraceLoad
from bench.peers.outcome import ClosedLoop, Goodput, PeerOutcome
from bench.peers.peer import Peer, Places
from bench.peers.prepare import CannotRun
from bench.peers.record import read_written, write_files
from cluster.errors import BatonError

MACHINE = Machine("a CPU", 2, (), "3", 10.0, 20.0, 30.0, 40.0)
RATES = {"baton": 100.0, "quick": 80.0, "slow": 30.0, "other": 60.0}


class Stage:
    """Plays the servers; what it is told to break breaks. `played` is what happened, in order."""

    def __init__(self) -> None:
        self.played: list[str] = []
        self.broken: dict[str, Exception] = {}  # "start quick 1", "loops quick 1" or "search quick"
        self.probes: dict[str, int] = {}
        self.enough: dict[str, float] = {}

    def do(self, what: str) -> None:
        self.played.append(what)
        if what in self.broken:
            raise self.broken[what]

    @contextlib.contextmanager
    def serving(self, _: Comparison, peer: Peer, outcome: PeerOutcome, number: int) -> Iterator[str]:
        self.do(f"start {peer.name} {number}")
        outcome.start_s.append(1.0)
        yield f"{number}"

    def loops(
        self,
        _: Comparison,
        peer: Peer,
        outcome: PeerOutcome,
        number: str,
        loops: Any,
        num_round: int,
        report: Any,
        tell: Any,
    ) -> None:
        self.do(f"loops {peer.name} {number}")
        report.has_new_figures = True
        outcome.rounds.append([loop(concurrency, RATES[peer.name]) for concurrency, _ in loops])

    def search(
        self,
        _: str,
        trace: Any,
        found: Any,
        num_probes: int,
        max_s: float,
        enough: float,
        name: str,
        tell: Any,
    ) -> tuple[list[Goodput], dict[str, Any], bool]:
        self.do(f"search {name}")
        self.probes[name], self.enough[name] = num_probes, enough
        assert num_probes * 48.0 <= max_s * 1.5
        assert found is not None
        rate = RATES[name] / 100
        done = Goodput(target=0.9, requests_per_s=rate, ci_low=None, ci_high=None, is_converged=True)
        meanwhile = {"others_cores": 0.25, "stolen_cores": 0.0, "fp32_gflop_per_s_before": RATES[name]}
        return [done], {"probes": [], "probe_meanwhile": [meanwhile]}, False


def loop(concurrency: int, rate: float) -> ClosedLoop:
    return ClosedLoop(
        concurrency=concurrency,
        num_requests=8,
        num_failed=0,
        output_tok_per_s=rate,
        ttft_p50_ms=300.0,
        ttft_p99_ms=300.0,
        tpot_p50_ms=20.0,
        tpot_p99_ms=20.0,
        valid=True,
    )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(compare_peers, "serving", made.serving)
    monkeypatch.setattr(compare_peers, "measure_peer", made.loops)
    monkeypatch.setattr(compare_peers, "search_goodput", made.search)
    monkeypatch.setattr(compare_peers, "prepare", lambda *_: None)
    monkeypatch.setattr(compare_peers, "versions", lambda _: {})
    return made


def run(tmp_path: Path, *names: str, **changes: Any) -> dict[str, PeerOutcome]:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": i, "input_length": 1000, "output_length": 200} for i in range(4000))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "places": Places(tmp_path, tmp_path, "python", "demo", gguf=None, tcmalloc=None),
        "cores": (0,),
        "num_rounds": 2,
        "is_together": False,
        "closed_loops": ((1, 3), (8, 16)),
        "chats": None,
        "trace": TraceLoad(
            path=trace,
            scale=16.0,
            slos=parse_slos("ttft=2s,tpot=100ms"),
            probe_s=40.0,
            seeds=(0, 1, 2),
            targets=(0.9, 0.99),
            max_probes=20,
            tolerance=0.2,
        ),
        "no_trace_reason": None,
        "goodput_names": frozenset(),
        "budget_s": 3600.0,
        "model_title": "m",
        "not_chosen": {},
        "earlier": None,
        "max_loop_s": 120.0,
        "out": tmp_path / "table",
    } | changes
    peers = [
        Peer(
            name=name,
            title=name.title(),
            precision="-",
            weight_bits=16,
            settings={},
            argv=(),
            model="m",
            is_baton=name == "baton",
        )
        for name in names
    ]
    outcomes = compare_peers.compare(Comparison(**fields), peers, MACHINE, lambda _: None)
    return {one.name: one for one in outcomes}


def test_searches_run_in_the_last_round_while_the_server_runs_anyway(tmp_path: Path, stage: Stage) -> None:
    run(tmp_path, "baton", "slow", "quick")
    first = [f"{what} {name} 0" for name in ("baton", "slow", "quick") for what in ("start", "loops")]
    assert stage.played[:6] == first
    assert stage.played[6:] == [
        *("start quick 1", "loops quick 1", "search quick"),
        *("start slow 1", "search slow"),  # far behind at every load: no second round, but its search
        *("start baton 1", "loops baton 1", "search baton"),
    ]
    assert stage.enough == {"quick": 0.0, "slow": 0.4, "baton": 0.0}
    assert stage.probes["slow"] < stage.probes["quick"]


def test_the_table_says_what_the_machine_did_meanwhile(tmp_path: Path, stage: Stage) -> None:
    run(tmp_path, "baton", "quick", num_rounds=1)
    quick, slow = sorted((RATES["baton"], RATES["quick"]))
    assert (
        "- the machine meanwhile: in a loop or probe others used 0.25 cores at most, and the machine's host "
        f"took 0.00 at most; just before each, fp32 products ran at {quick:.0f} to {slow:.0f} GFLOP/s"
    ) in (tmp_path / "table.md").read_text()


def test_a_single_round_is_followed_by_the_searches_alone(tmp_path: Path, stage: Stage) -> None:
    run(tmp_path, "baton", "quick", num_rounds=1)
    assert stage.played[4:] == ["start quick 1", "search quick", "start baton 1", "search baton"]


@pytest.mark.parametrize("error", [CannotRun("it died"), BatonError("no answer"), OSError("no such file")])
def test_a_start_that_fails_later_costs_that_part_alone(
    tmp_path: Path, stage: Stage, error: Exception
) -> None:
    stage.broken["start quick 1"] = error
    found = run(tmp_path, "baton", "quick", "other")
    assert found["quick"].cannot_run is None
    assert [len(one) for one in found["quick"].rounds] == [2]
    assert str(error) in (found["quick"].rounds_note or "")
    assert str(error) in (found["quick"].goodput_note or "")
    assert [bool(found[name].goodput) for name in ("baton", "quick", "other")] == [True, False, True]
    text = (tmp_path / "table.md").read_text()
    assert f"its last start broke off: {error}" in text
    assert f"- Quick, max goodput: not searched: {error}" in text


def test_a_server_that_never_had_a_figure_cannot_run(tmp_path: Path, stage: Stage) -> None:
    stage.broken["loops quick 0"] = BatonError("no answer")
    found = run(tmp_path, "baton", "quick", "other")
    assert found["quick"].cannot_run == "no answer"
    assert "start quick 1" not in stage.played
    assert found["other"].goodput
    assert found["baton"].goodput


def test_a_search_that_fails_costs_itself_alone(tmp_path: Path, stage: Stage) -> None:
    stage.broken["search quick"] = BatonError("the trace is too short")
    found = run(tmp_path, "baton", "quick")
    assert found["quick"].goodput_note == "not searched: the trace is too short"
    assert [len(one) for one in found["quick"].rounds] == [2, 2]
    assert found["baton"].goodput


def test_time_that_is_over_is_said_and_loops_come_first(tmp_path: Path, stage: Stage) -> None:
    found = run(tmp_path, "baton", "quick", budget_s=100.0)
    assert not stage.probes
    assert [len(one.rounds) for one in found.values()] == [2, 2]
    assert found["baton"].goodput_note == "not searched: the 2 minutes were over"


def test_the_searches_together_fit_the_budget(tmp_path: Path, stage: Stage) -> None:
    run(tmp_path, "baton", "quick", "other", "slow", budget_s=1800.0)
    first = next(iter(stage.probes))
    assert stage.probes[first] * 48.0 < 1800.0 * 0.5
    assert all(num >= 5 for num in stage.probes.values())


OLDER = {
    "parts": [{"facts": {"date": "2026-11-28"}, "machine": {}}],
    "peers": [
        {
            "name": "baton-disaggregated",
            "title": "Baton, disaggregated",
            "precision": "bf16 weights",
            "weight_bits": 16,
            "kv_bits": 16,
            "is_baton": True,
            "settings": {},
            "start_s": [15.7],
            "rounds": [[msgspec.to_builtins(loop(8, 102.0))]],
            "goodput": [
                {
                    "target": 0.9,
                    "requests_per_s": 2.77,
                    "ci_low": None,
                    "ci_high": None,
                    "is_converged": False,
                    "notes": ["Seed 2: the search stopped after 8 of at most 8 probes."],
                }
            ],
        }
    ],
    "searches": {"baton-disaggregated": {"settings": {"growth": 1.6, "seed_by_seed": True}, "probes": []}},
}


def test_a_table_of_an_older_comparison_is_added_to(tmp_path: Path, stage: Stage) -> None:
    """Written before seeds told their brackets: its figures stay as they are, and new ones come beside."""
    earlier = tmp_path / "older.json"
    earlier.write_text(json.dumps(OLDER))
    found = run(tmp_path, "baton", "quick", earlier=earlier, num_rounds=1)
    assert found["baton-disaggregated"].goodput[0].requests_per_s == 2.77
    assert found["quick"].goodput
    assert "| Baton, disaggregated | 90% | ≥ 2.77 | – |" in (tmp_path / "table.md").read_text()
    again = read_written(tmp_path / "table.json")
    assert [one.name for one in again.peers] == ["baton-disaggregated", "baton", "quick"]
    assert set(again.searches) == {"baton-disaggregated", "baton", "quick"}


def test_rounds_without_a_trace_keep_what_is_known_of_the_searches(tmp_path: Path, stage: Stage) -> None:
    stage.broken["search quick"] = BatonError("the trace is too short")
    run(tmp_path, "baton", "quick")
    again = {
        "earlier": tmp_path / "table.json",
        "trace": None,
        "no_trace_reason": "no trace",
        "num_rounds": 1,
    }
    found = run(tmp_path, "baton", "quick", "other", **again)
    assert found["baton"].goodput
    assert found["quick"].goodput_note == "not searched: the trace is too short"
    assert found["other"].goodput_note == "no trace"


def test_the_table_of_a_file_is_written_anew_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marks follow the rule of today; figures are the file's."""
    source = tmp_path / "older.json"
    source.write_text(json.dumps(OLDER))
    assert peers_main(["--from", str(source)]) == 0
    assert "| Baton, disaggregated | 90% | ≥ 2.77 | – |" in (tmp_path / "older.md").read_text()
    assert read_written(source).peers[0].goodput[0].requests_per_s == 2.77
    assert peers_main(["--from", str(source), "--out", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other.md").read_text() == (tmp_path / "older.md").read_text()
    assert peers_main(["--from", str(tmp_path / "none.json")]) == 1
    assert "none.json: cannot be read" in capsys.readouterr().err


def test_the_committed_tables_are_those_of_their_files(tmp_path: Path) -> None:
    committed = sorted((Path(__file__).parents[3] / "bench" / "results").glob("peers-*.json"))
    assert committed
    for source in committed:
        write_files(tmp_path / source.stem, read_written(source))
        assert (tmp_path / f"{source.stem}.md").read_text() == source.with_suffix(".md").read_text()
        assert (tmp_path / source.name).read_bytes() == source.read_bytes()
