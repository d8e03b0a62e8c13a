"""Roles for tests of the launcher: real processes, no model. What a role does is in the file that its
configuration's `model` (workers) or `model_dir` (routers) names, one behaviour per role name:

    {"decode-0": "fail", "prefill-0": "crash-once", "router-0": "slow-stop"}

A router with "wish WORKER ROLE" repeats that to its launcher, which takes it once all serve.
Every role appends "NAME EPOCH EVENT PID" lines to `<file>.log`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cluster.errors import ModelError
from cluster.role_cli import main
from cluster.role_config import RouterConfig, WorkerConfig


async def run(
    config: RouterConfig | WorkerConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    on_wish: Callable[[str, str], None] | None = None,
) -> None:
    if isinstance(config, RouterConfig):
        name, epoch, script = str(config.router), 0, Path(config.model_dir)
    else:
        name, epoch, script = str(config.worker), int(config.epoch), Path(config.model)
    behaviour = json.loads(script.read_text()).get(name, "")

    def note(event: str) -> None:
        with Path(f"{script}.log").open("a") as log:
            log.write(f"{name} {epoch} {event} {os.getpid()}\n")

    note("start")
    if isinstance(config, WorkerConfig):
        note(config.role.value)
    if behaviour == "fail":
        raise ModelError(f"{script}: the weights are truncated")
    if behaviour == "die":
        os._exit(3)
    if behaviour == "never-ready":
        await stop.wait()
        return
    note(f"ready-omp{os.environ.get('OMP_NUM_THREADS')}")
    if on_ready is not None:
        on_ready()
    if behaviour == "crash-once" and epoch == 1:
        threading.Timer(0.3, os._exit, (9,)).start()
    while behaviour.startswith("wish ") and on_wish is not None and not stop.is_set():
        on_wish(*behaviour.split()[1:])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.3)
    await stop.wait()
    note("stopping")
    if behaviour == "ignore-stop":
        await asyncio.Event().wait()
    note("stopped")


if __name__ == "__main__":
    main("fake_roles:run")
