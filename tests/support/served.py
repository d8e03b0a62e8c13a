"""A server as a user starts it, over HTTP: any, and `baton serve`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.support.local_cluster import free_port
from tests.support.plain_http import plain_client
from tests.support.processes import ROOT


class HttpServer(ABC):
    """A server on a port of this machine, and what tests ask of it."""

    def __init__(self) -> None:
        self.port = free_port()

    def client(self) -> httpx.Client:
        return plain_client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def wait(self, what: str, timeout_s: float, condition: Callable[[httpx.Client], bool]) -> float:
        """Until the server meets a condition; returns the seconds it took."""
        started = time.monotonic()
        with self.client() as client:
            while True:
                elapsed = time.monotonic() - started
                self.check_alive()
                try:
                    if condition(client):
                        return elapsed
                except httpx.TransportError:
                    pass  # it does not listen yet
                assert elapsed < timeout_s, f"{what} not within {timeout_s} s: {self.text()}"
                time.sleep(0.05)

    @abstractmethod
    def text(self) -> str:
        """What its processes have printed."""

    @abstractmethod
    def check_alive(self) -> None:
        """Fails when a process has ended that should not have."""

    def worker_is_ready(self, name: str, epoch: int) -> bool:
        worker = self.workers().get(name, {})
        return (worker.get("epoch"), worker.get("state")) == (epoch, "ready")

    def workers(self) -> dict[str, dict[str, Any]]:
        with self.client() as client:
            return {worker["id"]: worker for worker in client.get("/cluster").json()["workers"]}

    def chat(self, **fields: Any) -> dict[str, Any]:
        with self.client() as client:
            response = client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "Hello there"}], "timings": True} | fields,
            )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


class Served(HttpServer):
    """A running `baton serve`. Its processes are known by a mark in their environment."""

    def __init__(
        self, directory: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.marker = f"TEST_RUN_{uuid.uuid4().hex}"
        self.output = directory / f"{self.marker}.out"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("BATON", "RAY"))}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cluster.cli", "serve", "--port", str(self.port), *arguments],
                cwd=ROOT,
                env=inherited | dict(environment) | {self.marker: "1"},
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return self.output.read_text()

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.text()
