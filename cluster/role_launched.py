"""A role's process as the local launcher starts it: `python -m ROLE --launcher-fd N`.

1. It imports the role's code while the launcher still prepares the model, and says so.
2. A thread of its own reads the channel: the configuration, probes, the wish to stop.
3. It serves until stopped, says why it ended, and exits. Should the launcher die, so does this process, at
   once: by the kernel's doing on Linux, by the end of the channel anywhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import Future
from typing import Final

from cluster.launch_channel import (
    MAX_PACKET_BYTES,
    Alive,
    Ended,
    FromLauncher,
    FromRole,
    Loaded,
    Probe,
    Serve,
    Serving,
    Stop,
    Wish,
    from_launcher,
    to_packet,
)
from cluster.launch_processes import die_with_parent
from cluster.preflight import check_own_packages
from cluster.role_config import RouterConfig, WorkerConfig
from cluster.role_process import StopSwitch, load_entry, one_line, serve_role, stop_on_signals

PROBE_S: Final = 4.0  # an event loop that takes longer gives no sign of life
ORPHANED_EXIT_CODE: Final = 137


class _Channel:
    """The role's end, followed by a thread until the process ends."""

    def __init__(self, end: socket.socket, switch: StopSwitch) -> None:
        self.config: Future[RouterConfig | WorkerConfig] = Future()
        self._end = end
        self._switch = switch
        threading.Thread(target=self._follow, name="launcher", daemon=True).start()

    def say(self, message: FromRole) -> None:
        """From any thread.

        Raises:
            OSError: the launcher is dead; `_follow` ends this process.
        """
        self._end.send(to_packet(message))

    def _follow(self) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher died with words of ours unread
            while packet := self._end.recv(MAX_PACKET_BYTES):
                self._hear(from_launcher(packet))
        os._exit(ORPHANED_EXIT_CODE)

    def _hear(self, message: FromLauncher) -> None:
        match message:
            case Serve(config):
                self.config.set_result(config)
            case Stop():
                self._switch.request()
            case Probe(number):
                if self._switch.responds(PROBE_S):
                    self.say(Alive(number))


def run_launched(entry: str, descriptor: int) -> int:
    """The process from here to its exit status."""
    die_with_parent()
    os.set_inheritable(descriptor, False)
    switch = StopSwitch()
    stop_on_signals(switch)
    channel = _Channel(socket.socket(fileno=descriptor), switch)
    error = _load(entry)
    channel.say(Loaded(error))
    if error:
        return 1
    config = channel.config.result()  # however long the model takes; the launcher has the deadline
    cause = serve_role(
        entry,
        config,
        switch,
        lambda: channel.say(Serving()),
        on_wish=lambda worker, role: channel.say(Wish(worker, role)),
    )
    channel.say(Ended(cause))
    return 1 if cause else 0


def _load(entry: str) -> str:
    try:
        check_own_packages()
        load_entry(entry)
    except Exception as error:  # told to the launcher, which tells a person
        return one_line(error)
    return ""
