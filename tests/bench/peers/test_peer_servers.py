"""Servers as processes, and a whole comparison of scripted ones."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.load.figures.slo import parse_slos
from bench.machine import Machine
from bench.peers.chats import Chats
from bench.peers.compare_peers import compare
from bench.peers.comparison import Comparison
from bench.peers.load import TraceLoad
from bench.peers.peer import PORT, Peer, Places
from bench.peers.prepare import CannotRun
from bench.peers.record import read_written
from bench.peers.server import PeerServer, descendants, group_members
from cluster.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(__file__).with_name("scripted_engine.py"))
CORES = tuple(sorted(os.sched_getaffinity(0)))
MACHINE = Machine("a CPU", 2, ("avx2",), "3.11", 10.0, 20.0, 30.0, 60.0)


def scripted(name: str, *extra: str, **fields: Any) -> Peer:
    values = {
        "precision": "-",
        "weight_bits": 16,
        "settings": {"script": "counts"},
        "model": "scripted",
    } | fields
    return Peer(
        name=name,
        title=name.title(),
        argv=(sys.executable, SCRIPT, PORT, *extra),
        environment={"PYTHONPATH": str(REPOSITORY)},
        **values,
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_ready_pinned_and_gone_afterwards(tmp_path: Path) -> None:
    with PeerServer(scripted("good"), CORES[:1], tmp_path / "log") as running:
        assert running.info.model == "scripted"
        assert running.info.max_model_len == 512
        assert os.sched_getaffinity(running.pid) == {CORES[0]}
    assert not is_alive(running.pid)
    assert set(os.sched_getaffinity(0)) == set(CORES)
    assert "serving scripted" in (tmp_path / "log").read_text()


def test_the_whole_group_is_ended(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "import os, runpy, subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()']);"
        f"open({str(child)!r}, 'w').write(str(p.pid));"
        f"sys.argv = [{SCRIPT!r}, sys.argv[1]]; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    peer = scripted("parent")
    peer = Peer(
        name=peer.name,
        title=peer.title,
        precision="-",
        weight_bits=16,
        settings={},
        model="scripted",
        argv=(sys.executable, "-c", program, PORT),
        environment=peer.environment,
    )
    with PeerServer(peer, CORES, tmp_path / "log"):
        pid = int(child.read_text())
        group = os.getpgid(pid)
        assert pid in group_members(group)
    assert group_members(group) == []


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    server = PeerServer(scripted("bad", "die"), CORES, tmp_path / "log")
    with (
        pytest.raises(CannotRun, match=r"ended with status 1 before it was ready: cannot start: the dog ate"),
        server,
    ):
        pass


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    peer = Peer(
        name="mute",
        title="Mute",
        precision="-",
        weight_bits=16,
        settings={},
        model="m",
        start_timeout_s=0.3,
        argv=(sys.executable, "-c", "import threading; threading.Event().wait()", PORT),
    )
    with pytest.raises(CannotRun, match="not ready within"), PeerServer(peer, CORES, tmp_path / "log"):
        pass


def test_a_server_that_says_not_yet_is_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        """
import http.server, itertools, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    answers = itertools.chain([503, 503], itertools.repeat(200))
    def do_GET(self): self.reply(200, {"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.reply(next(self.answers), {})
    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    )
    argv = (sys.executable, str(program), PORT)
    peer = Peer(name="late", title="Late", precision="-", weight_bits=16, settings={}, model="m", argv=argv)
    with PeerServer(peer, CORES, tmp_path / "log") as running:
        assert running.info.model == "m"
    assert (tmp_path / "log").read_text().count('" 503 ') == 2


def test_a_comparison_measures_all_that_can_run_and_names_the_rest(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 100 * i, "input_length": 80 + i, "output_length": 24} for i in range(2000))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = Comparison(
        places=Places(tmp_path / "cache", REPOSITORY, sys.executable, "demo", gguf=None, tcmalloc=None),
        cores=CORES,
        num_rounds=2,
        is_together=False,
        closed_loops=((2, 3),),
        chats=None,
        trace=TraceLoad(
            path=trace,
            scale=8.0,
            slos=parse_slos("ttft=5s"),
            probe_s=1.2,
            seeds=(0,),
            targets=(0.9,),
            max_probes=1,
            tolerance=0.1,
        ),
        no_trace_reason=None,
        goodput_names=frozenset(),
        budget_s=600.0,
        model_title="a script",
        not_chosen={"Slow": "only if named: it is slow", "Rival": "measured after all"},
        earlier=None,
        max_loop_s=200.0,
        out=tmp_path / "out" / "peers",
    )
    peers = [
        scripted("baton", is_baton=True),
        scripted("rival", family="rivals"),
        scripted("dying", "die", family="rivals"),
        scripted("absent", needs_isa=frozenset({"no_such_flag"})),
    ]
    told: list[str] = []
    outcomes = {one.name: one for one in compare(comparison, peers, MACHINE, told.append)}
    for name in ("baton", "rival"):
        assert [[run.concurrency for run in one] for one in outcomes[name].rounds] == [[2], [2]]
        assert all(run.num_failed == 0 for one in outcomes[name].rounds for run in one)
    assert "the dog ate the weights" in (outcomes["dying"].cannot_run or "")
    assert "no_such_flag" in (outcomes["absent"].cannot_run or "")
    order = [line for line in told if line.startswith("round")]
    assert [line.rpartition(" ")[2] for line in order] == ["Baton", "Rival", "Dying", "Rival", "Baton"]
    written = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert [peer["name"] for peer in written["peers"]] == ["baton", "rival", "dying", "absent"]
    assert len(written["results"]["rival"]) == 2
    assert [one.target for one in outcomes["rival"].goodput] == [0.9]
    assert outcomes["dying"].goodput == []
    assert [line for line in told if line.startswith("max goodput")] == [
        "max goodput: Rival, at most 1 probes",
        "max goodput: Baton, at most 1 probes",
    ]
    assert len(written["searches"]["rival"]["probes"]) == 1
    table = (tmp_path / "out" / "peers.md").read_text()
    assert "| Rival | 90% |" in table
    assert "- Slow: only if named: it is slow" in table
    assert "measured after all" not in table
    assert "- model: a script" in table
    assert "of a budget of 10" in table
    assert outcomes["rival"].took_s["search"] > 0
    assert outcomes["rival"].took_s["all"] > outcomes["rival"].took_s["search"]
    assert len(outcomes["rival"].start_s) == 2  # searched while its last round's server ran
    add_a_round(comparison, peers[:2])


def add_a_round(comparison: Comparison, peers: list[Peer]) -> None:
    """A later run adds to what an earlier one wrote, and keeps what it does not measure again. Its prompts
    are chats, the same for every server.
    """
    written = comparison.out.with_name("peers.json")
    chats = Chats(lambda text: [len(word) for word in text.split()], 90)
    more = dataclasses.replace(
        comparison, earlier=written, num_rounds=1, closed_loops=((1, 1),), trace=None, chats=chats
    )
    outcomes = {one.name: one for one in compare(more, peers, MACHINE, lambda line: None)}
    assert [[run.concurrency for run in one] for one in outcomes["rival"].rounds] == [[2], [2], [1]]
    assert "the dog ate the weights" in (outcomes["dying"].cannot_run or "")
    assert [one.target for one in outcomes["rival"].goodput] == [0.9]
    text = comparison.out.with_name("peers.md").read_text()
    assert "Run 2 of 2" in text
    assert "## 1 in flight" in text
    assert "## 2 in flight" in text
    assert "- prompts: 1 chats" in text
    whole = json.loads(written.read_text())
    assert len(whole["parts"]) == 2
    for name in ("baton", "rival"):
        assert [result["workload"]["kind"] for result in whole["results"][name]] == ["synthetic"] * 2 + [
            "given"
        ]
        assert whole["results"][name][-1]["workload"]["input"] == {"min": 90, "max": 90}
        assert [result["after_burst"] is None for result in whole["results"][name]] == [False, False, True]


def test_a_file_that_is_no_comparison_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"peers": 3}')
    with pytest.raises(ConfigError, match="not the JSON file of a comparison"):
        read_written(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_written(tmp_path / "missing.json")


def test_descendants_are_found_in_groups_of_their_own() -> None:
    """As Baton's launcher starts its workers."""
    inner = "import sys; print('up', flush=True); sys.stdin.read()"
    outer = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True, check=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        first, *others = descendants(process.pid)
        assert first == process.pid
        assert len(others) == 1
        assert os.getpgid(others[0]) == others[0]
        process.stdin.close()
