"""One peer as a running server: pinned to given cores, ready once it has answered, stopped as a whole.

1. `start`: the command in a process group of its own, output to a log, pinned to the cores.
2. Ready: `/v1/models` answers, then a completion of one token does. A process that ends before is an error
   that quotes its log.
3. `stop`: SIGTERM to the server, a grace period, then SIGKILL to whatever is left of the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bench.load.client.target import ServerInfo, Target, call, probe
from bench.peers.kinds.common import HOST
from bench.peers.peer import Peer
from bench.peers.prepare import CannotRun, ending, last_line
from cluster.errors import BatonError

POLL_S = 0.25  # HTTP has no way to wait for a server that does not listen yet
STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 10.0
FIRST_ANSWER_TIMEOUT_S = 300.0
NOT_YET = 503


@dataclass(frozen=True, slots=True)
class Running:
    target: Target
    info: ServerInfo
    pid: int  # of the server process, and of its group
    start_s: float  # until the first answer


class PeerServer:
    """`with PeerServer(peer, cores, log) as running:`"""

    def __init__(self, peer: Peer, cores: Sequence[int], log: Path) -> None:
        self._peer = peer
        self._cores = tuple(cores)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Running:
        """
        Raises:
            CannotRun: it did not start, ended early, or was not ready in time.
        """
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> Running:
        port = free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        bin_directory = "" if self._peer.python is None else f"{Path(self._peer.python).parent}{os.pathsep}"
        environment = os.environ | self._peer.environment
        environment["PATH"] = bin_directory + environment.get("PATH", "")
        try:
            with self._log.open("wb") as output, pinned(self._cores):
                self._process = subprocess.Popen(
                    self._peer.command(port),
                    env=environment,
                    cwd=self._log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise CannotRun(f"it cannot be started: {error}") from error
        target = Target(host=HOST, port=port)
        info = self._wait_ready(target, start + self._peer.start_timeout_s)
        return Running(target, info, self._process.pid, time.perf_counter() - start)

    def _wait_ready(self, target: Target, deadline: float) -> ServerInfo:
        assert self._process is not None
        while True:
            status = self._process.poll()
            if status is not None:
                raise CannotRun(
                    f"its server {ending(status)} before it was ready: "
                    f"{last_line(self._log)}; see {self._log}"
                )
            try:
                info = probe(target, self._peer.model or None, timeout_s=5.0)
                _first_answer(target, info.model)
                return info
            except CannotRun:
                raise
            except BatonError as error:
                if time.perf_counter() > deadline:
                    raise CannotRun(
                        f"it was not ready within {self._peer.start_timeout_s:.0f} s "
                        f"({error}); see {self._log}"
                    ) from error
                time.sleep(POLL_S)

    def stop(self) -> None:
        """End the server and all processes of its group; does nothing when there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # nobody is left: what is wanted
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=KILL_TIMEOUT_S)
        deadline = time.perf_counter() + KILL_TIMEOUT_S
        while group_members(process.pid):  # the kernel tells nobody when a process that is no child ends
            if time.perf_counter() > deadline:
                raise BatonError(
                    f"processes of {self._peer.name} survive SIGKILL; end group {process.pid} by hand"
                )
            time.sleep(POLL_S)


def _first_answer(target: Target, model: str) -> None:
    """
    Raises:
        CannotRun: the answer says that this will not work.
        BatonError: there is none yet.
    """
    body = {"model": model, "prompt": [1000, 1001], "max_tokens": 1, "temperature": 0}
    status, reply = call(target, "POST", "/v1/completions", body, timeout_s=FIRST_ANSWER_TIMEOUT_S)
    if status == NOT_YET:
        raise BatonError(f"the last answer was HTTP {status}")
    if status != 200:
        raise CannotRun(f"its first answer was HTTP {status}: {reply[:300].decode(errors='replace')}")


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run; those that only wait to be reaped do not count."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, process_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(entry.parent.name))
    return members


def descendants(root: int) -> list[int]:
    """A process and all that came from it and still run, in whatever groups they are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            _, parent = entry.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes started inside inherit these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
