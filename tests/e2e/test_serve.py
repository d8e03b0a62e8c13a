"""`baton serve` as a user runs it: Ray places the processes, the dead come back, nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.chaos.streams import Answer, build_bodies, read_stream
from tests.support.processes import ROOT, processes_of_run, wait_gone
from tests.support.served import Served
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def served(tiny: Path, tmp_path: Path) -> Iterator[Served]:
    arguments = ("--model", str(tiny), "--log-dir", str(tmp_path / "logs"), "--recovery-wait-s", "120")
    running = Served(tmp_path, *arguments)
    try:
        running.wait("ready", 120, lambda client: client.get("/ready").status_code == 200)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(60)


def restart_under_load(served: Served) -> None:
    """`baton restart` while requests come: the one decode worker is away for a while, and nothing is lost."""
    before = served.workers()
    path, body = build_bodies(1, seed=1, max_prompt_words=20, max_tokens=40)[0]
    expected = read_stream("127.0.0.1", served.port, path, body).result()
    ended = threading.Event()

    def ask() -> list[Answer]:
        answers = []
        while not ended.is_set():
            answers.append(read_stream("127.0.0.1", served.port, path, body))
        return answers

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(ask) for _ in range(4)]
        command = [sys.executable, "-m", "cluster.cli", "restart", "--url", f"http://127.0.0.1:{served.port}"]
        try:
            told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        finally:
            ended.set()
        answers = [answer for loop in loops for answer in loop.result(120)]
    assert told.returncode == 0, told.stderr
    assert "all workers restarted" in told.stdout
    after = served.workers()
    assert {name: worker["epoch"] for name, worker in after.items()} == {
        name: worker["epoch"] + 1 for name, worker in before.items()
    }
    assert [answer.error for answer in answers if answer.error is not None] == []
    assert {answer.result() for answer in answers} == {expected}


def test_serve_restart_and_stop(served: Served) -> None:
    """One run through the whole life: a disaggregated chat, killed workers, a rolling restart under load, a
    clean end (b140)."""
    answer = served.chat(max_tokens=8)
    assert answer["timings"]["prefill_worker"] == "prefill-0"
    assert answer["timings"]["decode_worker"] == "decode-0"

    for name in ("prefill-0", "decode-0"):
        os.kill(served.workers()[name]["pid"], signal.SIGKILL)
        served.wait(
            f"{name} back",
            60,
            lambda _, name=name: (
                served.workers().get(name, {}).get("epoch") == 2
                and served.workers()[name]["state"] == "ready"
            ),
        )
        served.wait("ready again", 30, lambda client: client.get("/ready").status_code == 200)
        assert served.chat(max_tokens=8, seed=1)["usage"]["completion_tokens"] > 0

    told = served.output.read_text()
    for name in ("prefill-0", "decode-0"):
        assert f"{name} died and is restarted as epoch 2" in told
    assert "raylet" not in told, "of a worker's death the launcher tells, and nobody else"

    restart_under_load(served)

    pids = processes_of_run(served.marker)
    assert len(pids) > 4, "the router, two workers and Ray"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.output.read_text()
    wait_gone(pids, 10)
    assert processes_of_run(served.marker) == set()


def _broken_models(directory: Path, tiny: Path) -> dict[str, tuple[Path, str]]:
    """name → (path, what the message must say)."""
    not_a_model = directory / "not-a-model"
    not_a_model.mkdir()
    (not_a_model / "readme.txt").write_text("hello")
    truncated = directory / "truncated"
    shutil.copytree(tiny, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    unknown = directory / "unknown"
    shutil.copytree(tiny, unknown)
    config = json.loads((unknown / "config.json").read_text())
    config |= {"model_type": "mamba9", "architectures": ["Mamba9ForCausalLM"]}
    (unknown / "config.json").write_text(json.dumps(config))
    return {
        "missing": (directory / "missing", "missing"),
        "not a model": (not_a_model, "not-a-model"),
        "truncated": (truncated, "model.safetensors"),
        "unknown architecture": (unknown, "Mamba9ForCausalLM"),
    }


def test_broken_models_and_a_taken_port_end_serve_with_one_sentence(tiny: Path, tmp_path: Path) -> None:
    runs = {
        name: (Served(tmp_path, "--model", str(path)), part)
        for name, (path, part) in _broken_models(tmp_path, tiny).items()
    }
    for name, (run, part) in runs.items():
        status = run.process.wait(120)
        text = run.output.read_text()
        assert status not in (0, None), name
        assert "Traceback" not in text, name
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, f"{name}: {text}"
        assert part in errors[0], f"{name}: {errors[0]}"
        wait_gone(processes_of_run(run.marker), 10)


def test_port_in_use(tiny: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "cluster.cli", "serve", "--model", str(tiny), "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert result.returncode != 0
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr
