"""Proof that a process is dead: what a decode worker waits for before it reuses blocks that a lost writer
could still write into.

A broken stream says that nothing more is to be heard from a peer, not that it has stopped: it may be hung
in the middle of a copy. The kernel's process descriptor (pidfd) turns readable when the last thread of
the process has exited, and after its memory mappings are gone: then nothing of it can write any more.

1. While the peer is surely alive (its stream is open), take `process_start_time(pid)`.
2. When its stream breaks, `await process_exit(pid, start_time)`: returns at once if the process is gone or
   the pid is another process's by now, otherwise when it exits. No polling.

There is no fallback by polling: where the kernel has no pidfd (before 5.3, or some sandboxes) or the peer
is in another pid namespace, in-place edges cannot be used safely; the error says to use `gloo`.
"""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

from cluster.errors import ConfigError

_START_TIME_FIELD = 22  # of /proc/<pid>/stat, counted from 1; see proc(5)


def process_start_time(pid: int) -> int | None:
    """When the process started, in clock ticks after boot: with the pid, its identity. None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[_START_TIME_FIELD - 3])


def open_process(pid: int) -> int | None:
    """A pidfd, to be closed by the caller; None if there is no such process.

    Raises:
        ConfigError: processes cannot be watched here.
    """
    if pid <= 0:
        raise ConfigError(f"process {pid} is not visible here (another container?): use `--kv-edge gloo`")
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"process {pid} cannot be watched on this system ({error}): use `--kv-edge gloo`"
        ) from error


def has_exited(pidfd: int) -> bool:
    """Whether the process of a pidfd is dead; does not wait."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def process_exit(pid: int, expected_start_time: int | None = None) -> None:
    """Return when the process is dead: exited, or replaced by another under the same pid.

    Waits as long as it takes; put `asyncio.timeout` around it for a deadline. Cancelling is clean.

    Raises:
        ConfigError: processes cannot be watched here.
    """
    pidfd = open_process(pid)
    if pidfd is None:
        return
    try:
        # Read after the pidfd is open: from here on both mean the same process.
        if expected_start_time is not None and process_start_time(pid) != expected_start_time:
            return
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        loop.add_reader(pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
    finally:
        os.close(pidfd)
