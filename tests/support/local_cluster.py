"""A real cluster of real processes without Ray: one router, N prefill and M decode workers, over loopback.

The plan is the launcher's own; only who starts the processes differs. Everything waits with a deadline, and
leaving the context ends every process it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.config import ClusterConfig, dump_config
from cluster.engine.backends import make_backend
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.launch_plan import RoleSpec, Site, plan_roles

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0


@dataclass
class LocalCluster:
    """Processes by role name ("router-0", "prefill-0", "decode-0", ...)."""

    roles: dict[str, RoleSpec]
    model_dir: str  # the prepared model
    directory: Path  # for sockets, logs and configurations
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    ready_fds: dict[str, int] = field(default_factory=dict)  # of roles not yet known to serve

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s)

    def get(self, path: str) -> Any:
        with self.client() as client:
            return client.get(path).json()

    def complete(self, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions; the body of a 200."""
        with self.client() as client:
            response = client.post("/v1/completions", json=fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def complete_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All at once, answers in order."""

        async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        async def run() -> list[dict[str, Any]]:
            limits = httpx.Limits(max_connections=len(bodies))
            async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
                return list(await asyncio.gather(*(one(client, body) for body in bodies)))

        return asyncio.run(run())

    def worker(self, name: str) -> dict[str, Any]:
        """This worker's entry of /cluster."""
        entries: list[dict[str, Any]] = self.get("/cluster")["workers"]
        return next(entry for entry in entries if entry["id"] == name)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels."""
        with self.client() as client:
            text = client.get("/metrics").text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.split("{", 1)[0].split(" ", 1)[0] == name and all(label in line for label in wanted)
        )

    # ---- processes -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a role, as its next epoch, and wait until it says that it serves."""
        self.epochs[name] = self.epochs.get(name, 0) + 1
        spec = self.roles[name].started(self.epochs[name], self.model_dir)
        path = self.directory / f"{name}.json"
        path.write_bytes(dump_config(spec.config))
        read_fd, write_fd = os.pipe()
        package = spec.entry.partition(".")[0]
        process = subprocess.Popen(
            [sys.executable, "-m", package, str(path), "--ready-fd", str(write_fd)],
            cwd=ROOT,
            env=os.environ | dict(spec.env),
            pass_fds=(write_fd,),
        )
        self.processes[name] = process
        self.ready_fds[name] = read_fd
        os.close(write_fd)

    def wait_started(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        read_fd = self.ready_fds.pop(name)
        try:
            readable, _, _ = select.select([read_fd], [], [], timeout_s)
            assert readable, f"{name} did not start within {timeout_s} s:\n{self.log(name)}"
            assert os.read(read_fd, 16) == b"ready\n", f"{name} ended at its start:\n{self.log(name)}"
        finally:
            os.close(read_fd)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until /ready answers 200."""
        self.wait_for(self._is_ready, timeout_s, "/ready")

    def _is_ready(self) -> bool:
        try:
            with self.client(timeout_s=5) as client:
                return client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Until `condition()` holds, looking every 20 ms from outside; returns the seconds it took."""
        started = time.monotonic()
        while not condition():
            elapsed = time.monotonic() - started
            assert elapsed < timeout_s, f"{what} not within {timeout_s} s; cluster: {self.get('/cluster')}"
            time.sleep(0.02)
        return time.monotonic() - started

    def wait_quiet(self, timeout_s: float = 5.0) -> float:
        """QUIET: nothing runs, waits or holds blocks anywhere; returns the seconds it took."""

        def quiet() -> bool:
            return all(
                worker["running"] == worker["waiting"] == worker["kv_blocks"]["used"] == 0
                for worker in self.get("/cluster")["workers"]
            )

        return self.wait_for(quiet, timeout_s, "quiet")

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(timeout=10)

    def restart(self, name: str) -> None:
        self.start(name)
        self.wait_started(name)

    def log(self, name: str) -> str:
        """The end of a role's log."""
        file = self.roles[name].config.log.file
        text = Path(file).read_text() if file and Path(file).exists() else ""
        return text[-4000:]

    def stop(self, timeout_s: float = 30.0) -> dict[str, int]:
        """TERM to all, then KILL what is left; exit statuses by name."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + timeout_s
        statuses = {}
        for name, process in self.processes.items():
            try:
                statuses[name] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait(10)
        return statuses


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def local_cluster(model: str | Path = "demo", **settings: Any) -> Iterator[LocalCluster]:
    """A cluster that is ready. `settings` are those of `ClusterConfig`."""
    port = free_port()
    config = ClusterConfig(model=str(model), port=port, **settings)
    prepared = prepare_model(config.model, Dtype(config.dtype), make_backend(config.backend, 1))
    with tempfile.TemporaryDirectory(prefix="baton-test-") as directory:
        site = Site(
            served_model_name=prepared.name,
            runtime_dir=directory,
            log_dir=directory,
            cluster_token=secrets.token_hex(16),
            num_cores=1,
        )
        roles = {spec.name: spec for spec in plan_roles(config, site)}
        cluster = LocalCluster(roles, str(prepared.directory), Path(directory), port)
        try:
            for name in roles:
                cluster.start(name)
            for name in roles:
                if name != "router-0":  # the router says so once it can serve, which needs the workers
                    cluster.wait_started(name)
            cluster.wait_started("router-0")
            cluster.wait_ready()
            yield cluster
        finally:
            cluster.stop()
