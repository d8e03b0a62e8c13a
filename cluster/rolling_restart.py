"""`baton restart`: ask the launcher of a running cluster for a rolling restart, and say how it goes.

1. `/cluster` names the launcher, which must be a process of this machine: it gets SIGUSR1.
2. The launcher drains one worker at a time and starts its next epoch (`cluster.launch_supervisor`).
3. `/cluster` is followed until every worker of before serves in a later epoch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cluster.client import get_json
from cluster.errors import BatonError

LOOK_INTERVAL_S: Final = 0.25  # HTTP has no way to be told


class RestartError(BatonError):
    """The cluster cannot be restarted from here, or did not come back in time."""


def restart_workers(url: str, timeout_s: float, say: Callable[[str], None]) -> float:
    """Replace every worker; returns the seconds it took.

    Raises:
        ClientError: the server cannot be reached.
        RestartError: no launcher here, or not every worker came back within `timeout_s`.
    """
    before = get_json(url, "/cluster")
    started_s = time.monotonic()
    _signal_launcher(before.get("launcher_pid"))
    epochs = _epochs(before)
    waiting = dict(epochs)
    while waiting:
        if time.monotonic() - started_s > timeout_s:
            raise RestartError(
                f"not restarted within {timeout_s:g} s: {', '.join(sorted(waiting))}; the launcher goes on"
            )
        now = {
            worker["id"]: worker["epoch"]
            for worker in get_json(url, "/cluster")["workers"]
            if worker["state"] == "ready"
        }
        for name in [name for name, epoch in waiting.items() if now.get(name, 0) > epoch]:
            del waiting[name]
            say(f"{name} serves as epoch {now[name]} ({len(epochs) - len(waiting)} of {len(epochs)})")
        time.sleep(LOOK_INTERVAL_S)
    return time.monotonic() - started_s


def _epochs(cluster: Any) -> dict[str, int]:
    return {worker["id"]: worker["epoch"] for worker in cluster["workers"]}


def _signal_launcher(pid: int | None) -> None:
    if not isinstance(pid, int):
        raise RestartError("this cluster was not started by `baton serve`: restart its workers one by one")
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"baton" not in command and b"cluster" not in command and b"launch" not in command:
            raise RestartError(f"process {pid} is not `baton serve`: run this on the machine that serves")
        os.kill(pid, signal.SIGUSR1)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise RestartError(
            f"there is no process {pid} here: run `baton restart` on the machine where `baton serve` runs"
        ) from error
    except PermissionError as error:
        raise RestartError(f"process {pid} is another user's: run `baton restart` as that user") from error
