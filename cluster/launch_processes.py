"""No process left: a role's process dies with its launcher, which adopts what others leave and ends it.

Ray's raylet starts the workers; when it goes first, they would pass to init and out of sight. As a
*subreaper* the launcher becomes their parent instead: at the end its children are what is left of the run.
Linux only; elsewhere nothing is adopted and `end_children` finds nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final

from cluster.process_place import process_place

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def become_subreaper() -> bool:
    """Orphans below this process become its children. False where the system cannot do it."""
    if not sys.platform.startswith("linux"):
        return False
    result: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return result == 0


def die_with_parent() -> bool:
    """The kernel kills this process when the thread that started it ends. False where it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    result: int = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return result == 0


def children(pid: int | None = None) -> frozenset[int]:
    """Direct children of a process, zombies included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except FileNotFoundError:
            continue  # the thread has ended since
    return frozenset(found)


def open_visible(place: str, pid: int) -> int | None:
    """A descriptor of a process that told `place` and `pid`, if it is visible from here and alive."""
    if not place or place != process_place():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


async def wait_ended(pidfd: int, timeout_s: float) -> None:
    """Until that process has ended, or for `timeout_s`."""
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)  # readable from its end on
    try:
        async with asyncio.timeout(timeout_s):
            await has_ended.wait()
    except TimeoutError:
        return
    finally:
        loop.remove_reader(pidfd)


def kill_process(pidfd: int) -> None:
    """SIGKILL to exactly that process, also when it is stopped; closes the descriptor."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # dead already
    finally:
        os.close(pidfd)


def end_children(keep: frozenset[int], grace_s: float) -> int:
    """Wait `grace_s` for all children but `keep` to end by themselves, kill the rest, reap them all.

    Children of a killed child become ours in turn and end the same way. Returns how many were killed.
    """
    deadline = time.monotonic() + grace_s
    num_killed = 0
    while left := children() - keep:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            for pid in left:
                if not _reap(pid):
                    os.kill(pid, signal.SIGKILL)
                    num_killed += 1
            remaining_s = 1.0  # a killed process ends as soon as the kernel lets it
        _wait_one(left, remaining_s)
    return num_killed


def _wait_one(pids: frozenset[int], timeout_s: float) -> None:
    """Until one of `pids` has ended and is reaped, or the time is over."""
    if any([_reap(pid) for pid in pids]):
        return
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        select.select(descriptors, [], [], timeout_s)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(pid: int) -> bool:
    """True if the child has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # reaped by whoever started it
