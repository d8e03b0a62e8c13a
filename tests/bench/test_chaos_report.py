"""What a chaos run's figures mean, on a run made by hand, and when a killed process had ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bench.chaos.faults import Fault, Gone, Injector, Kind, Moved, Resumed, read_events
from bench.chaos.report import to_json, to_table
from bench.chaos.run import ChaosOutcome


def made() -> ChaosOutcome:
    """A worker killed and one hung; one request lost both, another the first."""
    outcome = ChaosOutcome(num_streams=4, num_complete=4, num_equal=4, num_moved=2, is_quiet=True)
    outcome.faults = [
        Fault(Kind.KILL, "decode-0", 1, 100.0),
        Fault(Kind.STOP, "decode-1", 1, 101.0),
        Fault(Kind.KILL, "decode-0", 2, 200.0),
    ]
    outcome.ended = {("decode-0", 1): 100.25, ("decode-0", 2): 200.02}
    outcome.gone = [
        Gone("decode-0", 1, "end of the stream", 100.3),
        Gone("decode-1", 1, "no sign of life for 2.5 s", 103.5),
        Gone("decode-0", 2, "end of the stream", 200.05),
    ]
    outcome.moved = [
        Moved("a", "decode-0", "end", 100.3),
        Moved("b", "decode-0", "end", 100.3),
        Moved("a", "decode-1", "hung", 103.5),
    ]
    outcome.resumed = [Resumed("b", 0.5, 0.3, 0.1, 100.8), Resumed("a", 4.2, 0.4, 0.0, 104.5)]
    return outcome


def test_figures_by_hand() -> None:
    result = json.loads(json.dumps(to_json(made())))
    assert [fault["detected_s"] for fault in result["faults"]] == [0.3, 2.5, 0.05]
    assert [fault["process_ended_s"] for fault in result["faults"]] == [0.25, None, 0.02]
    assert [fault["requests_moved"] for fault in result["faults"]] == [2, 1, 0]
    assert result["detection_s"]["KILL"] == {"count": 2, "median": 0.175, "max": 0.3}
    assert result["detection_s"]["TERM"] is None
    assert result["detection_after_the_end_s"] == {"count": 2, "median": 0.04, "max": 0.05}
    # since the latest loss: 104.5 - 103.5 - 0.4, and 100.8 - 100.3 - 0.4
    assert result["resumed_beside_recompute_s"] == {"count": 2, "median": 0.35, "max": 0.6}
    assert result["within_target"] == {"KILL": [1, 2], "STOP": [1, 1], "resumed_beside_recompute": [2, 2]}


def test_the_table_says_it() -> None:
    table = to_table(to_json(made()))
    assert "| KILL | 2 | 0.175 / 0.300 s | 2 |" in table
    assert "| TERM | 0 | - | 0 |" in table
    assert "4 streams in 0 s: 100.0 % complete, 100.0 % equal" in table
    assert "KILL (0.1 s) 1 of 2, STOP (3 s) 1 of 1" in table


def test_the_log_is_read_as_the_router_writes_it(tmp_path: Path) -> None:
    texts = [
        "decode-0 epoch 3 is gone: it closed its stream",
        "req-1 RETRIED worker=decode-0 decode-0: it closed its stream",
        "req-1 RESUMED worker=decode-1 attempt 2 resumed_s=0.5000 prefill_s=0.3000 queue_s=0.1000",
        "something else",
    ]
    log = tmp_path / "router-0.log"
    log.write_text(
        "".join(json.dumps({"message": text, "time": "1970-01-01T00:01:40.250Z"}) + "\n" for text in texts)
    )
    assert list(read_events(log)) == [
        Gone("decode-0", 3, "it closed its stream", 100.25),
        Moved("req-1", "decode-0", "it closed its stream", 100.25),
        Resumed("req-1", 0.5, 0.3, 0.1, 100.25),
    ]


def test_the_end_of_a_killed_process_is_noted() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ended: dict[tuple[str, int], float] = {}
        worker: dict[str, Any] = {"id": "prefill-0", "epoch": 4, "pid": process.pid}
        worker |= {"state": "ready", "role": "prefill"}
        fault = Injector(1, (Kind.KILL,), ended).next([worker])
        assert fault is not None
        assert process.wait(30) == -signal.SIGKILL
        for thread in threading.enumerate():
            if thread.daemon and thread.name.startswith("Thread") and "_await_end" in thread.name:
                thread.join(30)
        assert ended.keys() == {("prefill-0", 4)}
        assert ended["prefill-0", 4] >= fault.at
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    assert not os.path.exists(f"/proc/{process.pid}")
