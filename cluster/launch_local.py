"""Roles as child processes on this machine: the launcher where Ray is not installed.

1. `LocalSession.place` starts `python -m ROLE --launcher-fd N`, in a session of its own, so that a Ctrl-C is
   the launcher's alone. The other end of N is a channel (`cluster.launch_channel`).
2. `LocalRole` turns what comes over the channel into answers. The process's end comes from the kernel (a
   pidfd), whatever was said before, and answers whatever is still asked.
3. What the process prints comes through a pipe and is told line by line under the role's name; its log goes
   where its configuration says.

The child dies with the launcher (`cluster.role_launched`). All of this happens on the launcher's event loop,
which must be the main thread's: the kernel ties a child's life to the thread that started it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from cluster.launch_channel import (
    MAX_PACKET_BYTES,
    Alive,
    Ended,
    FromLauncher,
    FromRole,
    Loaded,
    Probe,
    Serve,
    Serving,
    Stop,
    Wish,
    channel_pair,
    from_role,
    to_packet,
)
from cluster.launch_plan import RoleSpec
from cluster.launch_session import PLACE_TIMEOUT_S
from cluster.output_lines import OutputLines
from cluster.preflight import packages_root

END_TIMEOUT_S: Final = 5.0  # for an interpreter whose service is over to exit
KILL_TIMEOUT_S: Final = 5.0  # for the kernel to let a killed process go
_READ_BYTES: Final = 65536

Say = Callable[[str], object]


class LocalSession:
    """Implements `cluster.launch_session.Session`."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._roles: list[LocalRole] = []

    def place(self, spec: RoleSpec) -> LocalRole:
        self._roles = [role for role in self._roles if not role.has_exited]
        role = LocalRole(spec, self._say)
        self._roles.append(role)
        return role

    def close(self) -> None:
        """Kill what is left and wait for it; the event loop is over or does nothing else."""
        for role in self._roles:
            role.kill()
        while self._roles:
            self._roles.pop().reap()


class LocalRole:
    """Implements `cluster.launch_session.Placed`; one process, started by the constructor."""

    def __init__(self, spec: RoleSpec, say: Say) -> None:
        self._name = spec.name
        self._say = say
        self._lines = OutputLines()
        loop = self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[str] = loop.create_future()
        self._serving: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()  # the service
        self._exited: asyncio.Future[None] = loop.create_future()  # the process
        self._alive: asyncio.Future[None] = loop.create_future()  # to the latest probe
        self._num_probes = 0
        self._wishes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        try:
            self._process, self._pidfd, self._channel = _start(spec)
        except OSError as error:
            self._is_over(f"no process can be started for it: {error.strerror}")
            return
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._read_channel)
        loop.add_reader(self._output, self._read_output)
        loop.add_reader(self._pidfd, self._on_exit)

    @property
    def has_exited(self) -> bool:
        return self._exited.done()

    # ---- what the driver asks ------------------------------------------------------------------

    async def load(self) -> str:
        await asyncio.wait([self._loaded], timeout=PLACE_TIMEOUT_S)
        if self._loaded.done():
            return self._loaded.result()
        return f"its process did not load its code within {PLACE_TIMEOUT_S:g} s"

    def run(self, spec: RoleSpec) -> Awaitable[str]:
        self._send(Serve(spec.config))
        return asyncio.shield(self._ended)

    async def wait_ready(self, timeout_s: float) -> bool:
        either: list[asyncio.Future[Any]] = [self._serving, self._ended]
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return self._serving.done() and not self._ended.done()

    async def responds(self, timeout_s: float) -> bool:
        self._num_probes += 1
        self._alive = self._loop.create_future()
        self._send(Probe(self._num_probes))
        await asyncio.wait(
            [self._alive, self._exited], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return self._alive.done() or self._exited.done()

    async def next_wish(self, timeout_s: float) -> tuple[str, str] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wishes.get()
        except TimeoutError:
            return None

    async def stop(self) -> None:
        self._send(Stop())

    async def end(self) -> None:
        await asyncio.wait([self._exited], timeout=END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        if not self.has_exited:
            self._process.kill()

    def reap(self) -> None:
        """Wait for a killed process and let go of it; nothing is answered any more."""
        if self.has_exited:
            return
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._say(f"{self._name}: the system does not let its process {self._process.pid} end")
        self._close()

    # ---- what the process says -----------------------------------------------------------------

    def _send(self, message: FromLauncher) -> None:
        """A process that is dead, or takes nothing more, does not answer either: that is seen elsewhere."""
        if self.has_exited:
            return
        try:
            self._channel.send(to_packet(message))
        except OSError:
            return

    def _read_channel(self) -> None:
        while True:
            try:
                packet = self._channel.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:  # it is ending: `_on_exit` follows
                self._loop.remove_reader(self._channel)
                return
            self._hear(from_role(packet))

    def _hear(self, message: FromRole) -> None:
        match message:
            case Loaded(error):
                self._loaded.set_result(error)
            case Serving():
                self._serving.set_result(None)
            case Alive(number):
                if number == self._num_probes and not self._alive.done():
                    self._alive.set_result(None)
            case Wish(worker, role):
                self._wishes.put_nowait((worker, role))
            case Ended(cause):
                self._ended.set_result(cause)

    def _read_output(self) -> None:
        while True:
            try:
                data = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return
            self._tell(data)
            if not data:  # closed by the process, which may live on
                self._loop.remove_reader(self._output)
                return

    def _tell(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            self._say(f"{self._name}: {line}")

    def _on_exit(self) -> None:
        status = self._process.wait()
        self._read_channel()
        self._read_output()
        self._tell(b"")  # a line without an end, where something the process started still holds the pipe
        self._close()
        self._is_over(describe_end(status, self._lines.last))

    def _is_over(self, cause: str) -> None:
        for answer in (self._loaded, self._ended):
            if not answer.done():
                answer.set_result(cause)
        self._exited.set_result(None)

    def _close(self) -> None:
        for descriptor in (self._channel.fileno(), self._output, self._pidfd):
            self._loop.remove_reader(descriptor)  # no error on a loop that is closed
        self._channel.close()
        os.close(self._pidfd)
        assert self._process.stdout is not None
        self._process.stdout.close()


def describe_end(status: int, last_line: str) -> str:
    """Why a process is gone that said nothing: `status` as `subprocess` has it, and what it printed last."""
    if status < 0:
        try:
            return f"its process was killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"its process was killed by signal {-status}"
    text = f"its process ended with status {status}"
    return f"{text}: {last_line}" if last_line else text


def _start(spec: RoleSpec) -> tuple[subprocess.Popen[bytes], int, socket.socket]:
    """The process, its pidfd, and our end of its channel.

    Raises:
        OSError: the system has no room for it, or no pidfds.
    """
    channel, child_end = channel_pair()
    with ExitStack() as undo:
        undo.enter_context(channel)
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-m", package_of(spec.entry), "--launcher-fd", str(child_end.fileno())],
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
                env=os.environ | dict(spec.env) | import_environment(os.environ),
                start_new_session=True,
            )
        undo.enter_context(process)  # closes its pipe and waits,
        undo.callback(process.kill)  # once this has been done
        pidfd = os.pidfd_open(process.pid)
        undo.pop_all()
    return process, pidfd, channel


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """So that `python -m router` runs ours: not what lies under that name where the user happens to be."""
    root = str(packages_root())
    given = environment.get("PYTHONPATH", "")
    installed = {str(Path(path).resolve()) for path in site.getsitepackages()}
    paths = [*([] if root in installed else [root]), *([given] if given else [])]
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def package_of(entry: str) -> str:
    """`decode_worker` of `decode_worker.service:run`: its `__main__` runs that entry."""
    return entry.partition(":")[0].partition(".")[0]
