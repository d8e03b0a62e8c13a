"""The Ray actor that carries one role. Ray starts and watches it and never sees a request.

The role's service runs in a thread with an event loop of its own; `stop`, `wait_ready` and `responds` come in
on other threads of the actor. Results are plain strings: an error's one line, or "" for none. SIGTERM to the
process is a stop: the service drains.
"""

from __future__ import annotations

import os
import signal
import threading

from cluster.errors import ConfigError
from cluster.preflight import check_own_packages
from cluster.process_place import process_place
from cluster.role_config import load_config
from cluster.role_process import StopSwitch, load_entry, one_line, serve_role

NUM_THREADS = 5  # run, wait_ready, responds, stop, and one to spare


class RoleActor:
    """One process, one role, one life: never reused after `run` ended."""

    def __init__(self) -> None:
        self._switch = StopSwitch()
        self._is_ready = threading.Event()
        self._has_ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._switch.request())

    def process(self) -> tuple[str, int]:
        """Where this process is, and its pid there."""
        return process_place(), os.getpid()

    def load(self, entry: str) -> str:
        """Import the role's code, while the launcher still prepares the model."""
        try:
            check_own_packages()
            load_entry(entry)
        except Exception as error:  # reported instead of raised: it need not survive pickling
            return one_line(error)
        return ""

    def run(self, entry: str, config_json: bytes) -> str:
        """Serve until stopped. Returns why it ended, "" after a stop."""
        try:
            return serve_role(entry, load_config(config_json), self._switch, self._is_ready.set)
        except ConfigError as error:  # this machine's code is another version
            return one_line(error)
        finally:
            self._has_ended.set()
            self._is_ready.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Until the role serves; False when it ended, or does not serve within `timeout_s`."""
        return self._is_ready.wait(timeout_s) and not self._has_ended.is_set()

    def responds(self, timeout_s: float) -> bool:
        """Whether the service's event loop turns."""
        return self._switch.responds(timeout_s)

    def stop(self) -> None:
        self._switch.request()
