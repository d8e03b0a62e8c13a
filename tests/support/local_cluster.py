"""A real cluster without Ray (`tests.support.processes`) and a client of it, for end-to-end tests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from cluster.config import ClusterConfig, PlacementName
from tests.support.plain_http import plain_async_client, plain_client
from tests.support.processes import LocalCluster as Processes

POOL_BYTES = 64 << 20


class LocalCluster:
    """Roles by name ("router-0", "prefill-0", "decode-0", ...), and requests over HTTP."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    # ---- requests ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.processes.url

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        return plain_client(base_url=self.url, timeout=timeout_s)

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
            async with plain_async_client(base_url=self.url, timeout=300, limits=limits) as client:
                return list(await asyncio.gather(*(one(client, body) for body in bodies)))

        return asyncio.run(run())

    # ---- what the cluster says of itself -------------------------------------------------------

    def worker(self, name: str) -> dict[str, Any]:
        """This worker's entry of /cluster; {} while it is not there."""
        entries: list[dict[str, Any]] = self.get("/cluster")["workers"]
        return next((entry for entry in entries if entry["id"] == name), {})

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

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Until `condition()` holds, looking every 20 ms from outside; returns the seconds it took."""
        started = time.monotonic()
        while not condition():
            elapsed = time.monotonic() - started
            assert elapsed < timeout_s, f"{what} not within {timeout_s} s; cluster: {self.get('/cluster')}"
            time.sleep(0.02)
        return time.monotonic() - started

    def wait_heard(self, name: str) -> None:
        """Until a heartbeat of this idle worker tells of all that it did before this call: the second sign of
        life, as the first may be the last of its other messages."""
        for _ in range(2):
            started = time.monotonic()

            def is_new(since: float = started) -> bool:
                age_s: float = self.worker(name).get("heartbeat_age_s", math.inf)
                return age_s + 0.001 < time.monotonic() - since  # it is rounded

            self.wait_for(is_new, 30.0, f"a heartbeat of {name}")

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        def is_ready() -> bool:
            with self.client(timeout_s=5) as client:
                return client.get("/ready").status_code == 200

        self.wait_for(is_ready, timeout_s, "/ready")

    def wait_quiet(self, timeout_s: float = 20.0) -> float:
        """QUIET: nothing runs, waits or holds blocks anywhere; returns the seconds it took."""

        def is_quiet() -> bool:
            return all(
                worker["running"] == worker["waiting"] == worker["kv_blocks"]["used"] == 0
                for worker in self.get("/cluster")["workers"]
            )

        return self.wait_for(is_quiet, timeout_s, "quiet")

    # ---- processes -----------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        self.processes.restart(name)


def free_port() -> int:
    """A port that is free, as the two after it are (routers, admin ports), and that no connection is given:
    those a system hands out begin at 32768 (Linux) or 49152."""
    for port in random.Random().sample(range(20_000, 32_000), 200):
        with contextlib.ExitStack() as probes:
            try:
                for number in range(port, port + 3):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            return port
    raise AssertionError("no three ports in a row are free")


@contextlib.contextmanager
def local_cluster(
    model: str | Path = "demo", placement: PlacementName = "remote", **settings: Any
) -> Iterator[LocalCluster]:
    """A cluster that serves, one compute thread per worker. `settings` are those of `ClusterConfig`.

    Unless told otherwise every prompt is computed by a prefill worker, so that KV moves in every test: the
    elastic placement would keep most of these small ones where they decode. Pools are small, too: each worker
    touches all of its own before it is ready.
    """
    config = ClusterConfig(
        model=str(model),
        port=free_port(),
        threads_per_worker=1,
        placement=placement,
        **{"prefill_kv_bytes": POOL_BYTES, "decode_kv_bytes": POOL_BYTES} | settings,
    )
    with Processes(config, start_timeout_s=120.0) as processes:
        yield LocalCluster(processes)
