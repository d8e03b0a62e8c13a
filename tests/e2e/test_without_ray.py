"""Where Ray cannot be imported: roles started by hand, and `baton serve` with its local launcher. Both give
the tokens of a request that one worker computes alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.streams import Answer, build_bodies, read_stream
from cluster.cluster_token import write_private
from tests.support.local_cluster import free_port
from tests.support.processes import ROOT, processes_of_run, wait_gone
from tests.support.served import HttpServer, Served
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(300)]

NO_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("Ray is blocked here")

sys.meta_path.insert(0, NoRay())
"""
# A sampled one: its answer depends on every bit of the logits.
PATH, BODY = build_bodies(2, seed=5, max_prompt_words=60, max_tokens=40)[1]
KV_AND_EDGES = ("--prefill-kv", "16MiB", "--decode-kv", "16MiB")


@dataclass(frozen=True)
class Bench:
    """What all clusters here have in common."""

    model: Path
    environment: dict[str, str]  # in which no process can import Ray


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("no-ray")
    (directory / "sitecustomize.py").write_text(NO_RAY)
    environment = {"PYTHONPATH": str(directory)}
    blocked = subprocess.run(
        [sys.executable, "-c", "import ray"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Ray is blocked here" in blocked.stderr
    return Bench(write_tiny_model(directory / "tiny"), environment)


class ByHand(HttpServer):
    """Roles by name, each a process as a person would start it."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        super().__init__()
        self.marker = f"TEST_RUN_{uuid.uuid4().hex}"
        self.roles: dict[str, subprocess.Popen[bytes]] = {}
        self._directory = directory
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("BATON", "RAY"))}
        self._environment = inherited | bench.environment | {self.marker: "1"}
        self._address = f"tcp:127.0.0.1:{free_port()}"
        token = directory / "token"
        write_private(token, uuid.uuid4().hex.encode())
        self._common = ("--model", str(bench.model), "--cluster-token-file", str(token))

    def start(self, module: str, *arguments: str) -> None:
        place = ("--listen" if module == "router" else "--router", self._address)
        with (self._directory / f"{module}.out").open("wb") as output:
            self.roles[module] = subprocess.Popen(
                [sys.executable, "-m", module, *place, *self._common, *arguments],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return "\n".join(file.read_text() for file in self._directory.glob("*.out"))

    def check_alive(self) -> None:
        assert all(role.poll() is None for role in self.roles.values()), self.text()


@pytest.fixture(scope="module")
def alone(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ByHand, Answer]]:
    """A cluster by hand, its one worker started before its router; and that worker's answer."""
    cluster = ByHand(bench, tmp_path_factory.mktemp("by-hand"))
    try:
        cluster.start("decode_worker", "--threads-per-worker", "1", "--decode-kv", "16MiB")
        cluster.wait("a worker without a router", 60, lambda _: "cannot reach the router" in cluster.text())
        router = ("--port", str(cluster.port), "--prefill", "0", "--placement", "remote")
        cluster.start("router", *router)
        cluster.wait("ready", 60, lambda client: client.get("/ready").status_code == 200)
        yield cluster, read_stream("127.0.0.1", cluster.port, PATH, BODY)
    finally:
        for role in cluster.roles.values():
            role.kill()
            role.wait(10)


def test_by_hand(alone: tuple[ByHand, Answer]) -> None:
    """A prefill worker joins while the cluster serves; SIGTERM drains each process."""
    cluster, expected = alone
    assert expected.is_complete, expected.error
    assert expected.token_ids
    cluster.start("prefill_worker", "--threads-per-worker", "1", "--prefill-kv", "16MiB")
    cluster.wait("prefill-0", 60, lambda _: cluster.workers().get("prefill-0", {}).get("state") == "ready")
    timings: dict[str, Any] = cluster.chat(max_tokens=4)["timings"]
    assert (timings["prefill_worker"], timings["decode_worker"]) == ("prefill-0", "decode-0")
    assert read_stream("127.0.0.1", cluster.port, PATH, BODY).result() == expected.result()
    for name in ("router", "prefill_worker", "decode_worker"):
        cluster.roles[name].terminate()
        assert cluster.roles[name].wait(30) == 0, cluster.text()
    assert processes_of_run(cluster.marker) == set()


def test_serve_with_the_local_launcher(bench: Bench, alone: tuple[ByHand, Answer], tmp_path: Path) -> None:
    expected = alone[1].result()
    run_directory = Path(f"/tmp/b{uuid.uuid4().hex[:8]}")
    run_directory.mkdir()
    settings = ("--model", str(bench.model), "--placement", "remote", "--log-dir", str(tmp_path / "logs"))
    places = ("--runtime-dir", str(run_directory), "--recovery-wait-s", "120", *KV_AND_EDGES)
    served = Served(tmp_path, "--launcher", "local", *settings, *places, environment=bench.environment)
    try:
        served.wait("ready", 120, lambda client: client.get("/ready").status_code == 200)
        answer = served.chat(max_tokens=4)["timings"]
        assert (answer["prefill_worker"], answer["decode_worker"]) == ("prefill-0", "decode-0")
        assert read_stream("127.0.0.1", served.port, PATH, BODY).result() == expected

        os.kill(served.workers()["decode-0"]["pid"], signal.SIGKILL)
        served.wait("decode-0 again", 60, lambda _: served.worker_is_ready("decode-0", 2))
        assert read_stream("127.0.0.1", served.port, PATH, BODY).result() == expected
        assert "decode-0 died and is restarted as epoch 2: its process was killed by SIGKILL" in (
            served.output.read_text().replace("\n", " ")
        )

        pids = processes_of_run(served.marker)
        assert len(pids) == 5, "the launcher, its guard, a router and two workers"
        maps = "\n".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        assert "/ray/" not in maps
        shared = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0, served.output.read_text()
        wait_gone(pids, 10)
        assert processes_of_run(served.marker) == set()
        assert [file for file in shared if Path(file).exists()] == []
        assert list(run_directory.iterdir()) == []
        assert {file.name for file in (tmp_path / "logs").iterdir()} == {
            "router-0.log",
            "prefill-0.log",
            "decode-0.log",
        }
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(10)
        run_directory.rmdir()
