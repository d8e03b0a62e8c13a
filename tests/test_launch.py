"""`serve` with fake roles and either launcher, real Ray or none: start, restart, failing start, stop, and
nothing left behind.

Each test starts a launcher in a process of its own and marks its environment, which all of its processes
inherit: what is left of a run can be found whatever became of its parents.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launch_guard import RUN_VARIABLE, processes_of
from tests.support.processes import LOOPBACK, ROOT, listening_addresses, processes_of_run, wait_gone

pytestmark = pytest.mark.ray

START_TIMEOUT_S = 60.0


class Launcher:
    """A running `serve` whose output is read line by line, always with a deadline."""

    def __init__(self, kind: str, directory: Path, *settings: str, **behaviours: str) -> None:
        self.kind = kind
        self.script = directory / "script.json"
        self.script.write_text(
            json.dumps({name.replace("_", "-"): what for name, what in behaviours.items()})
        )
        self.marker = f"TEST_RUN_{uuid.uuid4().hex}"
        self.run_directory: Path | None = None
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("BATON", "RAY"))
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                ROOT / "tests/support/launch_fake.py",
                self.script,
                "drain_grace_s=20",
                f"launcher={kind}",
                *settings,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | {"PYTHONPATH": str(ROOT), self.marker: "1"},
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self._buffer = b""
        self.lines: list[str] = []

    def wait_line(self, part: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next line that contains `part`."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                self.lines.append(line.decode())
                if part in self.lines[-1]:
                    return self.lines[-1]
            readable, _, _ = select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no `{part}` within {timeout_s:g} s, only {self.lines}"
            data = os.read(self._output.fileno(), 65536)
            assert data, f"ended without `{part}`: {self.lines} {self.process.communicate()[1].decode()}"
            self._buffer += data

    def wait_seen(self, part: str) -> None:
        """As `wait_line`, for a line that may have come already."""
        if not any(part in line for line in self.lines):
            self.wait_line(part)

    def events(self) -> list[tuple[str, int, str, int]]:
        """(role, epoch, event, pid) as the fake roles noted them."""
        rows = [line.split() for line in Path(f"{self.script}.log").read_text().splitlines()]
        return [(name, int(epoch), event, int(pid)) for name, epoch, event, pid in rows]

    def pid_of(self, role: str, epoch: int) -> int:
        return next(
            pid for name, known, event, pid in self.events() if (name, known, event) == (role, epoch, "start")
        )

    def processes(self) -> set[int]:
        """All that lives of the run: by the environment, and by open files for those that overwrite it."""
        by_files = processes_of(str(self.run_directory)) if self.run_directory is not None else set()
        return processes_of_run(self.marker) | by_files

    def wait_ready(self) -> Path:
        """The run's directory, once every role serves."""
        self.wait_line("ready")
        environment = Path(f"/proc/{self.pid_of('router-0', 0)}/environ").read_bytes().split(b"\0")
        entries = dict(entry.decode().partition("=")[::2] for entry in environment)
        self.run_directory = Path(entries[RUN_VARIABLE])
        return self.run_directory

    def end(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Exit status and standard error; nothing of the run may be left."""
        _, errors = self.process.communicate(timeout=timeout_s)
        assert self.processes() == set()
        return self.process.returncode, errors.decode()


class Launchers:
    """Starts launchers of one kind, and ends them."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._started: list[Launcher] = []

    def __call__(self, *settings: str, **behaviours: str) -> Launcher:
        self._started.append(Launcher(self._kind, self._directory, *settings, **behaviours))
        return self._started[-1]

    def close(self) -> None:
        for launcher in self._started:
            launcher.process.kill()
            launcher.process.communicate()
            for pid in launcher.processes():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["ray", "local"])
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launchers]:
    launchers = Launchers(request.param, tmp_path)
    yield launchers
    launchers.close()


def test_start_restart_and_clean_stop(launch: Launchers) -> None:
    launcher = launch(prefill_0="crash-once")
    run_directory = launcher.wait_ready()
    assert "progress converting 5/9" in launcher.lines

    # one crashes by itself, one is killed from outside; each comes back as epoch 2, the rest goes on
    # (the crash comes a moment after its own start, which may be before the others serve)
    launcher.wait_seen("prefill-0 died and is restarted as epoch 2")
    launcher.wait_seen("prefill-0 serves again (epoch 2)")
    began_s = time.monotonic()
    os.kill(launcher.pid_of("decode-0", 1), signal.SIGKILL)
    launcher.wait_line("decode-0 died and is restarted as epoch 2")
    assert time.monotonic() - began_s < 2.0
    launcher.wait_line("decode-0 serves again (epoch 2)")
    assert time.monotonic() - began_s < 15.0
    ready = [(name, epoch) for name, epoch, event, _ in launcher.events() if event == "ready-omp1"]
    assert sorted(ready) == [
        ("decode-0", 1),
        ("decode-0", 2),
        ("prefill-0", 1),
        ("prefill-0", 2),
        ("router-0", 0),
    ]

    # b152: nothing of Ray can be reached from outside this machine
    addresses = listening_addresses(launcher.processes())
    assert (addresses == set()) == (launcher.kind == "local")
    assert addresses <= LOOPBACK

    token = (run_directory / "cluster_token").read_text()
    for pid in launcher.processes():
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()

    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == (0, "")
    assert not run_directory.exists()
    order = [name for name, _, event, _ in launcher.events() if event == "stopping"]
    assert order[0] == "router-0"
    assert sorted(order) == ["decode-0", "prefill-0", "router-0"]


def test_a_router_wishes_a_worker_into_another_role(launch: Launchers) -> None:
    """Through the channel or the actor; the next process is up before the one before drains."""
    settings = ("roles=planned", "prefill=0", "decode=2", "threads_per_worker=1")
    launcher = launch(*settings, router_0="wish worker-1 prefill")
    launcher.wait_ready()
    launcher.wait_seen("worker-1 serves as a prefill worker (epoch 2)")
    events = [(name, epoch, event) for name, epoch, event, _ in launcher.events() if name == "worker-1"]
    assert [one for one in events if one[2] in ("prefill", "decode", "stopped")] == [
        ("worker-1", 1, "decode"),
        ("worker-1", 1, "stopped"),
        ("worker-1", 2, "prefill"),
    ]
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == (0, "")


def test_failing_start_reports_its_cause_and_ends(launch: Launchers) -> None:
    launcher = launch("decode=2", "threads_per_worker=3", decode_1="fail")
    status, errors = launcher.end(START_TIMEOUT_S)
    assert status == 1
    assert errors == f"error: decode-1 did not start: {launcher.script}: the weights are truncated\n"


def test_b140_a_killed_launcher_takes_everything_with_it(launch: Launchers) -> None:
    launcher = launch()
    launcher.wait_ready()
    left = launcher.processes()
    assert launcher.pid_of("decode-0", 1) in left
    launcher.process.kill()
    wait_gone(left, 20.0)
    assert launcher.processes() == set()
    assert launcher.run_directory is not None
    assert not launcher.run_directory.exists()


def test_b132_the_second_signal_forces_the_end(launch: Launchers) -> None:
    launcher = launch("drain_grace_s=60", router_0="ignore-stop")
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_line("stopping")
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.process.wait(1.0)
    launcher.process.send_signal(signal.SIGINT)
    status, errors = launcher.end()
    assert (status, errors) == (130, "error: stopped at once, requests were cut\n")


def test_a_signal_while_it_starts_ends_it(launch: Launchers) -> None:
    launcher = launch(decode_0="never-ready")
    launcher.wait_line("phase workers")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == (0, "")


@pytest.mark.timeout(240)
def test_hung_drained_and_rolling(launch: Launchers) -> None:
    """A stopped process is killed and replaced; SIGTERM to a worker drains and replaces it; SIGUSR1 to the
    launcher replaces all workers, one after the other."""
    launcher = launch("decode=2", "threads_per_worker=1")
    launcher.wait_ready()
    stopped = launcher.pid_of("decode-0", 1)
    os.kill(stopped, signal.SIGSTOP)
    launcher.wait_line("decode-0 died and is restarted as epoch 2: it hung and was killed")
    wait_gone({stopped}, 10.0)
    launcher.wait_line("decode-0 serves again (epoch 2)")

    os.kill(launcher.pid_of("prefill-0", 1), signal.SIGTERM)
    launcher.wait_line("prefill-0 left and is restarted as epoch 2")
    launcher.wait_line("prefill-0 serves again (epoch 2)")

    launcher.process.send_signal(signal.SIGUSR1)
    launcher.wait_line("rolling restart of all workers")
    for name, epoch in (("prefill-0", 3), ("decode-0", 3), ("decode-1", 2)):
        launcher.wait_line(f"{name} serves again (epoch {epoch})")
    launcher.wait_line("rolling restart done")
    started = [(name, epoch) for name, epoch, event, _ in launcher.events() if event == "start"]
    assert started[-3:] == [("prefill-0", 3), ("decode-0", 3), ("decode-1", 2)]
    stopping = [(name, epoch) for name, epoch, event, _ in launcher.events() if event == "stopping"]
    assert stopping == [("prefill-0", 1), ("prefill-0", 2), ("decode-0", 2), ("decode-1", 1)]
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == (0, "")
