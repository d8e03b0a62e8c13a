"""How a run is ended early, and who hears the signals that ask for it.

1. `signals_to` takes SIGINT, SIGTERM and SIGHUP over for the length of a block: a command's, from before its
   first measurement until its result is on disk, so that no impatient key loses what was measured.
2. Each signal is one `StopSwitch.stop`; a run that is connected to the switch wakes up and winds down.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSwitch:
    """Ends runs early, from any thread or signal handler; the second `stop` does not wait for the client
    processes.
    """

    def __init__(self) -> None:
        self.num_stops = 0
        self.was_connected = False  # a run has begun
        self._wake: Callable[[], None] | None = None
        self._lock = threading.RLock()  # a signal may come while this thread holds it

    def stop(self) -> None:
        with self._lock:
            self.num_stops += 1
            if self._wake is not None:
                self._wake()

    @contextmanager
    def connected(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` is called at each stop, also at those that came before; from the stopping thread."""
        with self._lock:
            self.was_connected = True
            self._wake = wake
            if self.num_stops:
                wake()
        try:
            yield
        finally:
            with self._lock:
                self._wake = None


@contextmanager
def signals_to(on_signal: Callable[[], None]) -> Iterator[None]:
    """Within the block a signal calls `on_signal`, in the main thread, and does nothing else.

    A SIGHUP that was ignored stays so (`nohup`). Elsewhere than in the main thread signals go their usual
    way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.getsignal(number)
        for number in SIGNALS
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN)
    }
    try:
        for number in before:
            signal.signal(number, lambda *_: on_signal())
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
