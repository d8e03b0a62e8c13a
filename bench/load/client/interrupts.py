"""How a run is ended early, and who hears the signals that ask for it.

1. `CommandSignals` takes SIGINT, SIGTERM and SIGHUP for a whole process: before the first measurement they
   end it with one line; after that each is one `StopSwitch.stop`, and at the end they do nothing, so that no
   impatient key loses what was measured or the status that it is worth.
2. `signals_to` does so for the length of a block, where a program measures something among other things.
3. A run that is connected to the switch wakes up at a stop, and winds down.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
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


class CommandSignals:
    """The signals of a command that has its process for itself, from its first import to its exit.

    `take` is called once, in the main thread. What measures finds it as the handler of SIGINT and uses its
    `switch` (`cli_session.uninterrupted`).
    """

    def __init__(self) -> None:
        self.switch = StopSwitch()

    def take(self) -> None:
        for number in _heard():
            signal.signal(number, self)

    def ignore(self) -> None:
        """The command is over: whatever is pressed while the interpreter winds down, its status stays."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.switch.was_connected:
            self.switch.stop()
            return
        with contextlib.suppress(OSError, AttributeError):  # nobody reads it, or there is no standard error
            sys.stderr.write("interrupted: nothing was measured or written\n")
            sys.stderr.flush()
        raise SystemExit(EXIT_INTERRUPTED)


def _heard() -> list[signal.Signals]:
    """A SIGHUP that is ignored stays so (`nohup`)."""
    return [
        number
        for number in SIGNALS
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN)
    ]


@contextmanager
def signals_to(on_signal: Callable[[], None]) -> Iterator[None]:
    """Within the block a signal calls `on_signal`, in the main thread, and does nothing else.

    Elsewhere than in the main thread signals go their usual way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _heard()}
    try:
        for number in before:
            signal.signal(number, lambda *_: on_signal())
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
