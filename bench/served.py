"""One `baton serve` process for a benchmark: started as a user would, ended by SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

from bench.machine import proportional_memory_bytes
from cluster.errors import BatonError

HOST = "127.0.0.1"
READY_TIMEOUT_S = 300.0  # a busy machine
STOP_TIMEOUT_S = 60.0
QUIET_POLL_S = 0.1


class ServedCluster:
    """A context manager: inside, the server is ready at `url`."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.start_s = 0.0  # from start to ready, once entered
        with socket.socket() as unused:
            unused.bind((HOST, 0))
            self.port = int(unused.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(self.port), *self.arguments]
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=5) as response:
            return json.load(response)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Until every worker has told that it has nothing to do and holds no blocks, so of its last step,
        too; False: not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            workers = self.get("/cluster")["workers"]
            if all(
                w["running"] == w["waiting"] == w["leases"] == w["kv_blocks"]["used"] == 0 for w in workers
            ):
                return True
            time.sleep(QUIET_POLL_S)
        return False

    def memory_mib(self) -> dict[str, dict[str, int]]:
        """Resident and proportional memory by process: the router and every worker."""
        cluster = self.get("/cluster")
        pids = {worker["id"]: worker["pid"] for worker in cluster["workers"]}
        pids["router"] = cluster["router_pid"]
        result = {}
        for name, pid in pids.items():
            rss, pss = proportional_memory_bytes(pid)
            result[name] = {"rss_mib": rss >> 20, "pss_mib": pss >> 20}
        return result

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise BatonError(f"baton serve did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None

    def _wait_ready(self) -> None:
        """
        Raises:
            BatonError: it ended, or was not ready in time.
        """
        deadline = time.perf_counter() + READY_TIMEOUT_S
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise BatonError(
                    f"baton serve ended with status {self._process.returncode} before it was ready"
                )
            try:
                self.get("/ready")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # HTTP has no way to wait for a server that does not listen yet
        raise BatonError(f"baton serve was not ready within {READY_TIMEOUT_S:.0f} s")
