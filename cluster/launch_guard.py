"""Ends what is left of a run whose launcher was killed, which cannot clean up after itself.

1. The launcher starts `python -m cluster.launch_guard DIRECTORY` and holds the other end of its input.
2. A byte there means a clean end: the guard leaves. End of file without one: the launcher is dead.
3. Then every process of the run, known by its environment and files, is killed, and the run's directory
   removed. Ray's own processes would follow their parents, but some only after a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

RUN_VARIABLE: Final = "_BATON_RUN"
NUM_ROUNDS: Final = 10  # a process may start another while we look; the last round finds none


class Guard:
    """The launcher's end. `close` tells the guard that all is well, and waits for it."""

    def __init__(self, run_directory: Path) -> None:
        os.environ[RUN_VARIABLE] = str(run_directory)  # every process of the run inherits it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch_guard", str(run_directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the launcher's
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        os.environ.pop(RUN_VARIABLE, None)
        with contextlib.suppress(BrokenPipeError):  # it was killed: then it does nothing either
            self._process.communicate(b".")


def processes_of(run_directory: str) -> set[int]:
    """This user's living processes that belong to the run, except this one."""
    found = {
        int(directory.name)
        for directory in Path("/proc").glob("[0-9]*")
        if _belongs(directory, run_directory)
    }
    return found - {os.getpid()}


def _belongs(process: Path, run_directory: str) -> bool:
    """By its environment; or, since a process that changes its title (Redis does) overwrites that, by a file
    it has open or by where it works."""
    try:
        if f"{RUN_VARIABLE}={run_directory}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        links = [process / "cwd", *(process / "fd").iterdir()]
    except OSError:  # ended while we looked, or another user's
        return False
    for link in links:
        with contextlib.suppress(OSError):
            if f"{os.readlink(link)}/".startswith(f"{run_directory}/"):
                return True
    return False


def end_run(run_directory: str) -> None:
    for _ in range(NUM_ROUNDS):
        left = processes_of(run_directory)
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(run_directory, ignore_errors=True)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not sys.stdin.buffer.read():
        end_run(sys.argv[1])


if __name__ == "__main__":
    main()
