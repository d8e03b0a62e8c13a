"""A worker that is to change its role, as the launcher's driver carries it out: scripted processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.clock import MonotonicClock
from cluster.config import ClusterConfig
from cluster.launch_driver import Driver
from cluster.launch_plan import RoleSpec, Site, plan_roles
from cluster.launch_supervisor import Supervisor

LIMIT_S = 20.0
MOVED = "worker-2"


class Process:
    """`load_says` is what its load ends with; `run` ends when it is asked to stop or killed."""

    def __init__(self, spec: RoleSpec, load_says: str) -> None:
        self.role, self._load_says = spec.role, load_says
        self.epoch = 0  # that it serves in; 0: none
        self.is_killed = False
        self.wishes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._over = asyncio.Event()

    async def load(self) -> str:
        return self._load_says

    async def run(self, spec: RoleSpec) -> str:
        self.epoch = getattr(spec.config, "epoch", 1)  # a router has none
        await self._over.wait()
        return ""

    async def wait_ready(self, timeout_s: float) -> bool:
        return True

    async def responds(self, timeout_s: float) -> bool:
        return True

    async def next_wish(self, timeout_s: float) -> tuple[str, str] | None:
        return await self.wishes.get()

    async def stop(self) -> None:
        self._over.set()

    async def end(self) -> None:
        self._over.set()

    def kill(self) -> None:
        self.is_killed = True
        self._over.set()


@dataclass
class Cluster:
    """The session and the report of a driver: what was placed and said."""

    load_says: str = ""  # of the processes to come
    placed: dict[str, list[Process]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    is_ready: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def place(self, spec: RoleSpec) -> Process:
        process = Process(spec, self.load_says)
        self.placed.setdefault(spec.name, []).append(process)
        return process

    def close(self) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)
        self._changed.set()

    def ready(self) -> None:
        self.is_ready = True
        self._changed.set()

    def stopping(self) -> None:
        pass

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def until_said(self, end: str) -> None:
        await self.until(lambda: any(text.endswith(end) for text in self.said))

    def wish(self, worker: str, role: str) -> None:
        self.placed["router-0"][0].wishes.put_nowait((worker, role))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    site = Site(
        served_model_name="fake",
        runtime_dir=str(tmp_path),
        log_dir=str(tmp_path / "logs"),
        cluster_token="secret-secret-secret",
        num_cores=2,
    )
    entries = dict.fromkeys(("router", "prefill", "decode"), "nothing:run")
    specs = plan_roles(ClusterConfig(model="demo", roles="planned", decode=2), site, entries)
    supervisor = Supervisor(
        [(one.name, one.role) for one in specs], start_timeout_s=LIMIT_S, drain_grace_s=1.0
    )
    made = Cluster()
    driver = Driver(made, specs, supervisor, made, MonotonicClock())
    model: Future[str] = Future()
    model.set_result(str(tmp_path))
    running = asyncio.create_task(driver.run(model))
    await made.until(lambda: made.is_ready)
    yield made
    driver.request_stop()
    async with asyncio.timeout(LIMIT_S):
        finish = await running
    assert (finish.exit_code, finish.error) == (0, None)
    driver.kill_all()


async def test_the_next_process_takes_over_in_the_other_role(cluster: Cluster) -> None:
    cluster.wish(MOVED, "prefill")
    await cluster.until_said(f"{MOVED} serves as a prefill worker (epoch 2)")
    before, after = cluster.placed[MOVED]
    assert (before.role, before.epoch, after.role, after.epoch) == ("decode", 1, "prefill", 2)


async def test_a_next_process_that_cannot_be_ends_and_the_worker_serves_on_as_it_was(
    cluster: Cluster,
) -> None:
    cluster.load_says = "no memory"
    cluster.wish(MOVED, "prefill")
    await cluster.until_said(f"{MOVED} cannot become a prefill worker: no memory")
    before, failed = cluster.placed[MOVED]
    assert (failed.is_killed, failed.epoch) == (True, 0)
    assert (before.is_killed, before.epoch) == (False, 1)

    cluster.load_says = ""
    cluster.wish(MOVED, "prefill")
    await cluster.until_said(f"{MOVED} serves as a prefill worker (epoch 2)")
    assert [one.epoch for one in cluster.placed[MOVED]] == [1, 0, 2]
    assert cluster.placed[MOVED][-1].role == "prefill"
