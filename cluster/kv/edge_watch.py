"""The watchdog of one edge: what it waits for has a deadline, and the first that passes ends the edge.

1. A thread that is about to wait says until when (`guard`); afterwards it says that the wait is over.
2. When a deadline passes, `on_late` is called, once and for all, from the watchdog's own thread: it breaks
   the edge off, and that fails or ends every wait on it. Aborting is the only way to end a receive on a GPU,
   which otherwise spins for ever.
3. `close` ends the thread.

`Deadlines` decides, without clock and thread; `EdgeWatch` sleeps until the next one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadlines:
    """What is waited for, and whether it is too late. Pure: `now` and deadlines in the same seconds."""

    def __init__(self) -> None:
        self._waits: dict[int, float] = {}
        self._next_ticket = 0
        self.is_over = False  # one has passed: the edge is dead, nothing more is decided

    def begin(self, deadline_s: float) -> int:
        """A wait until `deadline_s`; returns the ticket for `end`."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._waits[ticket] = deadline_s
        return ticket

    def end(self, ticket: int) -> None:
        """The wait is over, in time or not."""
        del self._waits[ticket]

    def next_s(self) -> float | None:
        """When to look again; None: nothing has to be looked at until another wait begins."""
        return None if self.is_over else min(self._waits.values(), default=None)

    def is_late(self, now_s: float) -> bool:
        """Whether a deadline has passed; true once only."""
        next_s = self.next_s()
        if next_s is None or now_s < next_s:
            return False
        self.is_over = True
        return True


class EdgeWatch:
    """The thread. It exists from the first wait to `close`."""

    def __init__(self, name: str, on_late: Callable[[], None]) -> None:
        self._name = name
        self._on_late = on_late
        self._changed = threading.Condition()  # over everything below
        self._deadlines = Deadlines()
        self._sleeps_until_s = math.inf  # the thread; it is not woken for what comes later
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @contextmanager
    def guard(self, deadline_s: float) -> Iterator[None]:
        """Around a wait; `deadline_s` as `time.monotonic()` has it."""
        with self._changed:
            ticket = self._deadlines.begin(deadline_s)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._main, name=f"{self._name} watch", daemon=True)
                self._thread.start()
            if deadline_s < self._sleeps_until_s:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.end(ticket)

    def close(self) -> None:
        """End the thread; idempotent. Not from within `on_late`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _main(self) -> None:
        while self._sleep_until_late():
            self._on_late()

    def _sleep_until_late(self) -> bool:
        """Whether a deadline passed; False: closed."""
        with self._changed:
            while not self._is_closed:
                now_s = time.monotonic()
                if self._deadlines.is_late(now_s):
                    return True
                next_s = self._deadlines.next_s()
                self._sleeps_until_s = math.inf if next_s is None else next_s
                self._changed.wait(None if next_s is None else max(0.0, next_s - now_s))
            return False
