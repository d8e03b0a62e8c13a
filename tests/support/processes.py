"""Real processes for tests: a cluster without Ray, and proof that nothing of a run is left.

`LocalCluster` starts `python -m router`, `prefill_worker` and `decode_worker` from the same plan that the
launcher uses. Readiness comes through a pipe; every wait has a deadline; `close` leaves no process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.cluster_token import write_private
from cluster.config import ClusterConfig, num_available_cores
from cluster.core_board import BoardFile
from cluster.engine.prepared_index import find_prepared
from cluster.launch_plan import RoleSpec, Site, plan_roles
from cluster.role_config import RouterConfig, dump_config
from cluster.runtime_dir import RuntimeDir

ROOT = Path(__file__).parents[2]
MODULES: Mapping[str, str] = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}
STOP_TIMEOUT_S = 10.0
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # as in /proc


class RoleProcess:
    """One role's process, in its current epoch."""

    def __init__(
        self, spec: RoleSpec, module: str, model_dir: str, directory: Path, python_path: str
    ) -> None:
        self.spec = spec
        self.epoch = 0
        self._module = module
        self._model_dir = model_dir
        self._directory = directory
        self._python_path = python_path
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.spec.name} was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the process has said so far, in every epoch."""
        file = self._directory / f"{self.spec.name}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self) -> None:
        """Start the next epoch; does not wait."""
        self.epoch += 1
        spec = self.spec.started(self.epoch, self._model_dir)
        file = self._directory / f"{spec.name}-{self.epoch}.json"
        write_private(file, dump_config(spec.config))
        self._ready_fd, write_fd = os.pipe()
        with (self._directory / f"{spec.name}.out").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(file), "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[write_fd],
                env=os.environ | dict(spec.env) | {"PYTHONPATH": self._python_path},
            )
        os.close(write_fd)

    def wait_ready(self, timeout_s: float) -> None:
        """Until the role serves; fails with what it said when it ends or takes too long."""
        readable, _, _ = select.select([self._ready_fd], [], [], timeout_s)
        answer = os.read(self._ready_fd, 16) if readable else b""
        os.close(self._ready_fd)
        self._ready_fd = -1
        state = "ended" if readable else f"is not ready after {timeout_s:g} s"
        assert answer == b"ready\n", f"{self.spec.name} {state}: {self.log}"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1


class LocalCluster:
    """A context manager: every role serves inside the `with`, none is left after it.

    `modules` and `model_dir` (a prepared model) replace the real roles and the conversion in tests of this
    helper and of the role processes.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        model_dir: str | None = None,
        modules: Mapping[str, str] = MODULES,
        python_path: Sequence[Path] = (),
        start_timeout_s: float = 60.0,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._modules = modules
        self._python_path = ":".join(map(str, (ROOT, *python_path)))
        self._start_timeout_s = start_timeout_s
        self._runtime_dir: RuntimeDir | None = None
        self._board = BoardFile()
        self._logs = tempfile.TemporaryDirectory(prefix="baton-logs-")
        self.roles: dict[str, RoleProcess] = {}

    @property
    def url(self) -> str:
        return f"http://{self._config.host}:{self._config.port}"

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> RoleProcess:
        return self.roles[name]

    def logs(self) -> dict[str, str]:
        """Everything that any process has logged or printed, by file name."""
        files = [file for file in Path(self._logs.name).iterdir() if file.suffix != ".json"]
        return {file.name: file.read_text(errors="replace") for file in files}

    def restart(self, name: str) -> None:
        """Kill the role and start its next epoch; returns when it serves."""
        self.roles[name].kill()
        self.roles[name].start()
        self.roles[name].wait_ready(self._start_timeout_s)

    def stop(self) -> dict[str, int]:
        """SIGTERM to the router, then to the workers, as the launcher does; their exit statuses."""
        statuses = {}
        routers = [role for role in self.roles.values() if role.spec.is_router]
        workers = [role for role in self.roles.values() if not role.spec.is_router]
        for group in (routers, workers):
            for role in group:
                role.signal(signal.SIGTERM)
            for role in group:
                statuses[role.spec.name] = role.wait(self._config.drain_grace_s + STOP_TIMEOUT_S)
        return statuses

    def close(self) -> None:
        for role in self.roles.values():
            role.kill()
        if self._runtime_dir is not None:
            self._runtime_dir.close()
            self._runtime_dir = None
        self._board.close()
        self._logs.cleanup()

    def _start(self) -> None:
        self._runtime_dir = RuntimeDir.create(self._config.runtime_dir)
        model_dir = self._model_dir or self._prepared()
        site = Site(
            served_model_name=self._config.served_model_name or "model",
            runtime_dir=str(self._runtime_dir.path),
            log_dir=self._logs.name,
            cluster_token=os.urandom(32).hex(),
            num_cores=num_available_cores(),
            core_board=self._board.path if self._config.idle_cores == "lend" else None,
        )
        for spec in plan_roles(self._config, site):
            directory = Path(self._logs.name)
            module = self._modules[spec.role]
            self.roles[spec.name] = RoleProcess(spec, module, model_dir, directory, self._python_path)
            self.roles[spec.name].start()
            if isinstance(spec.config, RouterConfig):
                assert spec.config.port, "choose a port: a test must know where to connect"
        deadline = time.monotonic() + self._start_timeout_s
        for role in self.roles.values():
            role.wait_ready(max(0.0, deadline - time.monotonic()))

    def _prepared(self) -> str:
        """Converted in this process, which has torch loaded already: the launcher's way begins a new one."""
        from cluster.engine.backends import make_backend  # imports torch, as does what follows
        from cluster.engine.model_spec import Dtype
        from cluster.engine.prepare import prepare_model

        config = self._config
        root = Path(config.cache_dir).expanduser() / "models"
        found = find_prepared(config.model, config.dtype, config.backend, root, config.quantization)
        if found is not None:
            return str(found)
        backend = make_backend(config.backend, 1, config.quantization)
        return str(prepare_model(config.model, Dtype(config.dtype), backend, cache_dir=root).directory)


def processes_of_run(marker: str) -> set[int]:
    """Living processes (no zombies) whose environment has `marker`, which their ancestor put there."""
    found = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and int(directory.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended while we looked
                is_zombie = (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_zombie and marker.encode() in (directory / "environ").read_bytes():
                    found.add(int(directory.name))
    return found


def listening_addresses(pids: set[int]) -> set[str]:
    """Local addresses (hexadecimal, as in /proc/net/tcp) on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def wait_gone(pids: set[int], timeout_s: float) -> None:
    """Until every process has ended; fails with the command lines of those that live on."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"still running: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"
        finally:
            os.close(descriptor)
