"""Wakes the event loop at a moment of the `perf_counter_ns` clock.

An event loop's own timers round to a millisecond; a late request is a false latency. Linux has timers that
are file descriptors and ring on time (some 0.1 ms on a quiet machine) without a spinning core, which would
be taken from a server on the same machine. Elsewhere the loop's timers must do; the lag is reported in any
case.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

NS = 1_000_000_000
CLOCK_MONOTONIC = 1  # the clock of perf_counter_ns on Linux
TFD_TIMER_ABSTIME = 1
TFD_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class _ItimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """One Linux timer. Setting it again replaces the moment."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = loop
        self._ring = ring
        self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._on_readable)

    def set(self, moment_ns: int) -> None:
        """Ring at `moment_ns`; at once if it is past."""
        moment_ns = max(moment_ns, 1)  # zero would disarm
        spec = _ItimerSpec(0, 0, moment_ns // NS, moment_ns % NS)
        if self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set again since
        self._ring()


class LoopTimer:
    """The event loop's own timer, behind the same interface; up to a millisecond late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, moment_ns: int) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0.0, (moment_ns - time.perf_counter_ns()) / NS), self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def make_alarm(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> TimerFd | LoopTimer:
    return TimerFd(loop, ring) if sys.platform == "linux" else LoopTimer(loop, ring)
