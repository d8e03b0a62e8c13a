"""Roles as processes of their own: readiness, signals, errors; and the helper that runs a cluster of them."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import role_process
from cluster.config import ClusterConfig
from cluster.errors import ModelError
from cluster.ids import Epoch, WorkerId
from cluster.role_config import WorkerConfig
from cluster.role_process import FORCED_EXIT_CODE, StopSwitch, one_line, serve_role
from cluster.wire.messages import Role
from tests.support.local_cluster import free_port
from tests.support.processes import ROOT, LocalCluster

SUPPORT = ROOT / "tests" / "support"
FAKES = dict.fromkeys(("router", "prefill", "decode"), "fake_roles")


def fake_cluster(tmp_path: Path, **behaviours: str) -> LocalCluster:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({name.replace("_", "-"): what for name, what in behaviours.items()}))
    config = ClusterConfig(model=str(script), port=free_port(), decode=2, drain_grace_s=10.0)
    return LocalCluster(
        config, model_dir=str(script), modules=FAKES, python_path=[SUPPORT], start_timeout_s=30.0
    )


def test_a_cluster_serves_restarts_and_stops(tmp_path: Path) -> None:
    with fake_cluster(tmp_path) as cluster:
        assert set(cluster.roles) == {"router-0", "prefill-0", "decode-0", "decode-1"}
        first = cluster["decode-0"].pid
        cluster.restart("decode-0")
        assert (cluster["decode-0"].epoch, cluster["decode-0"].pid == first) == (2, False)
        assert set(cluster.stop().values()) == {0}
    events = [line.split()[:3] for line in (tmp_path / "script.json.log").read_text().splitlines()]
    assert ["decode-0", "1", "start"] in events
    assert ["decode-0", "2", "stopped"] in events


def test_a_role_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    cluster = fake_cluster(tmp_path, prefill_0="fail")
    with pytest.raises(AssertionError) as raised, cluster:
        pytest.fail("it served")
    assert re.fullmatch(r"prefill-0 ended: error: .*: the weights are truncated\n", str(raised.value))


def test_b132_the_second_signal_ends_a_role_at_once(tmp_path: Path) -> None:
    with fake_cluster(tmp_path, decode_1="ignore-stop") as cluster:
        role = cluster["decode-1"]
        role.signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while "decode-1 1 stopping " not in (tmp_path / "script.json.log").read_text():
            assert time.monotonic() < deadline, "it was not told"  # two signals at once would be one
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            role.wait(0.3)
        role.signal(signal.SIGTERM)
        assert role.wait() == FORCED_EXIT_CODE


@pytest.mark.parametrize(("text", "message"), [("{", "not a role's configuration"), (None, "cannot read")])
def test_a_bad_configuration_file_is_one_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    result = subprocess.run(
        [sys.executable, SUPPORT / "fake_roles.py", file],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


async def test_a_stop_before_the_loop_runs_is_not_lost() -> None:
    switch = StopSwitch()
    switch.request()
    assert switch.bind().is_set()


def test_one_line_errors() -> None:
    assert one_line(ModelError("a\n  b")) == "a b"
    assert one_line(ValueError("x")) == "ValueError: x"
    assert one_line(KeyError()) == "KeyError"


def test_what_was_loaded_is_no_work_for_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def service(config: Any, *, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        order.append("loaded")
        on_ready()

    monkeypatch.setattr(role_process, "load_entry", lambda entry: service)
    monkeypatch.setattr(role_process, "configure_logging", lambda log, name: None)
    monkeypatch.setattr(gc, "freeze", lambda: order.append("frozen"))
    config = WorkerConfig(
        cluster_token="t",
        served_model_name="m",
        block_size=16,
        worker=WorkerId("decode-0"),
        role=Role.DECODE,
        epoch=Epoch(1),
        router_addresses=(),
        model="m",
        kv_address=None,
        runtime_dir="",
    )
    assert serve_role("any:run", config, StopSwitch(), lambda: order.append("ready")) == ""
    assert order == ["loaded", "frozen", "ready"]
