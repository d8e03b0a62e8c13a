"""One child process of the local launcher through its whole life: real processes, fake roles."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.launch_local import LocalRole, LocalSession, describe_end, package_of
from cluster.launch_plan import RoleSpec, Site, plan_roles
from tests.support.processes import ROOT, wait_gone

LIMIT_S = 60.0


class World:
    """A session, the roles' specs by name, and what was said."""

    def __init__(self, directory: Path, **behaviours: str) -> None:
        self.said: list[str] = []
        self.session = LocalSession(self.said.append)
        self.script = directory / "script.json"
        self.script.write_text(
            json.dumps({name.replace("_", "-"): what for name, what in behaviours.items()})
        )
        site = Site(
            served_model_name="fake",
            runtime_dir=str(directory),
            log_dir=str(directory / "logs"),
            cluster_token="secret-secret-secret",
            num_cores=2,
        )
        entries = dict.fromkeys(("router", "prefill", "decode"), "fake_roles:run")
        specs = plan_roles(ClusterConfig(model=str(self.script), decode=2), site, entries)
        self.specs = {spec.name: spec.started(1, str(self.script)) for spec in specs}

    def place(self, name: str) -> tuple[LocalRole, RoleSpec]:
        return self.session.place(self.specs[name]), self.specs[name]

    def pid(self, name: str) -> int:
        rows = [line.split() for line in Path(f"{self.script}.log").read_text().splitlines()]
        return next(int(pid) for who, _, event, pid in rows if (who, event) == (name, "start"))


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    made = World(tmp_path, decode_0="fail", decode_1="die")
    yield made
    made.session.close()


async def test_a_role_loads_serves_answers_drains_and_is_gone(world: World) -> None:
    (role, spec), (router, router_spec) = world.place("prefill-0"), world.place("router-0")
    assert await role.load() == await router.load() == ""
    ended = asyncio.ensure_future(role.run(spec))
    router_ended = asyncio.ensure_future(router.run(router_spec))
    assert await role.wait_ready(LIMIT_S)
    assert await router.wait_ready(LIMIT_S)
    assert await role.responds(LIMIT_S)
    pid = world.pid("prefill-0")
    command = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert b"secret-secret" not in command
    assert os.getsid(pid) == pid, "a Ctrl-C is not for it"
    assert Path(spec.config.log.file or "").read_text().endswith("prefill-0 is ready\n")

    os.kill(pid, signal.SIGSTOP)
    assert not await role.responds(0.2)
    os.kill(pid, signal.SIGCONT)
    await role.stop()
    assert await asyncio.wait_for(ended, LIMIT_S) == ""
    await role.end()
    assert role.has_exited
    assert await role.responds(0.0), "what is dead does not hang"
    assert not await role.wait_ready(LIMIT_S)
    assert not Path(f"/proc/{pid}").exists()

    router.kill()
    assert await asyncio.wait_for(router_ended, LIMIT_S) == "its process was killed by SIGKILL"
    router.kill()
    assert world.said == []


async def test_why_a_role_ended_is_told(world: World) -> None:
    (failing, failing_spec), (dying, dying_spec) = world.place("decode-0"), world.place("decode-1")
    assert await failing.load() == await dying.load() == ""
    failed, died = failing.run(failing_spec), dying.run(dying_spec)
    assert await failed == f"{world.script}: the weights are truncated"
    assert await died == "its process ended with status 3"
    assert not await dying.wait_ready(LIMIT_S)
    assert "the weights are truncated" in Path(failing_spec.config.log.file or "").read_text()


async def test_a_role_that_cannot_load_says_why_under_its_name(world: World) -> None:
    spec = dataclasses.replace(world.specs["prefill-0"], entry="no_such_role.service:run")
    cause = await world.session.place(spec).load()
    assert cause.startswith("its process ended with status 1: ")
    assert cause.endswith("No module named no_such_role")
    assert [line.partition(": ")[0] for line in world.said] == ["prefill-0"]


async def test_a_process_that_cannot_be_started_is_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pidfd(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    for target, name, value, reason in (
        (os, "pidfd_open", no_pidfd, "Function not implemented"),
        (sys, "executable", "/no/such/python", "No such file or directory"),
    ):
        monkeypatch.setattr(target, name, value)
        role, spec = world.place("prefill-0")
        cause = f"no process can be started for it: {reason}"
        assert (await role.load(), await role.run(spec), await role.wait_ready(0.0)) == (cause, cause, False)
        await role.end()
        assert not any(_is_child(int(name)) for name in os.listdir("/proc") if name.isdigit())


async def test_closing_the_session_leaves_no_process(world: World) -> None:
    role, _ = world.place("prefill-0")
    assert await role.load() == ""
    assert not role.has_exited
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_child(int(name))]
    world.session.close()
    assert [pid for pid in pids if _is_child(pid)] == []


def _is_child(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return int(state[1]) == os.getpid() and b"fake_roles" in command


def test_a_role_dies_with_its_launcher(tmp_path: Path) -> None:
    """The launcher is killed while its child still has nothing to do; no guard watches here."""
    code = """
import asyncio, os, signal
from pathlib import Path
from tests.cluster.test_launch_local import World
async def main():
    world = World(Path(os.environ["DIRECTORY"]))
    role, _ = world.place("prefill-0")
    assert await role.load() == ""
    print(role._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env=os.environ | {"DIRECTORY": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_gone({int(done.stdout)}, LIMIT_S)


def test_how_an_end_is_described() -> None:
    assert describe_end(-signal.SIGSEGV, "x") == "its process was killed by SIGSEGV"
    assert describe_end(-40, "") == "its process was killed by signal 40"
    assert describe_end(0, "") == "its process ended with status 0"
    assert describe_end(2, "no room") == "its process ended with status 2: no room"
    assert package_of("decode_worker.service:run") == "decode_worker"
    assert package_of("fake_roles:run") == "fake_roles"
