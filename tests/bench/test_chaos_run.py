"""A chaos run that cannot work is refused before anything starts, and a client that fails ends it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.chaos import __main__ as command
from bench.chaos import run
from bench.chaos.run import ChaosOutcome, ChaosSettings, Load
from bench.chaos.streams import Answer
from bench.served import ServedCluster


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--streams", "0"], "must be at least 1, not 0"),
        (["--streams", "-1"], "must be at least 1, not -1"),
        (["--faults", "-1"], "must be at least 0, not -1"),
        (["--concurrency", "0"], "must be at least 1, not 0"),
        (["--max-tokens", "many"], "not a whole number: 'many'"),
        (["--signals", "HUP"], "invalid choice"),
        (["--out", "/dev/null/chaos.json"], "Cannot write"),
        (["--out", "chaos.txt"], "choose another ending"),
    ],
)
def test_what_cannot_work_starts_no_cluster(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chaos", *given])
    monkeypatch.setattr(command, "run_chaos", lambda *_: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_client_that_fails_ends_the_wait_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Answer:
        raise KeyError("usage")

    monkeypatch.setattr(run, "read_stream", broken)
    settings = ChaosSettings(num_streams=5, num_faults=0, num_bodies=2, concurrency=2)
    cluster = cast(ServedCluster, SimpleNamespace(port=1))
    load = Load(cluster, settings, [Answer(), Answer()], ChaosOutcome())
    assert load.enough.wait(30)
    with pytest.raises(KeyError):
        load.close()
