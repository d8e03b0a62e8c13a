"""One life of a process: it runs, is stopped and continued (SIGSTOP, SIGCONT), or dies with all its state.

1. What a process is to do later, by itself or in one of its threads, goes through `later`.
2. While it is stopped nothing of it runs: what came due waits, as do the messages for it (`network`). When it
   is continued all of that happens a little later, each stream in its order, otherwise in any.
3. Dead, it does nothing any more: neither its timers nor its writes into other processes' memory.
4. Each process has a clock of its own, with another zero. `jump` sets it forward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.simulator.events import EventQueue
from cluster.ids import Epoch

if TYPE_CHECKING:
    from bench.simulator.network import Endpoint

_ARM_S = 0.02  # deadlines are looked at this often at most: timers may be late, as in a busy process
_EPSILON_S = 1e-6  # a tick is never early, whatever the rounding of two clocks
_WAKE_UP_S = 0.01  # within this time a continued process does what it slept through


class Process:
    """A router or worker of one epoch. Subclasses say what is due (`next_deadline`) and what a tick does."""

    def __init__(self, queue: EventQueue, rng: random.Random, name: str, epoch: Epoch) -> None:
        self.queue = queue
        self.name = name
        self.epoch = epoch
        self._label = f"{name}.{epoch}"
        self.is_alive = True
        self.is_stopped = False
        self.undisturbed_since = 0.0  # in the queue's time: continued, or its clock jumped
        self.endpoints: dict[Endpoint, None] = {}  # open streams, in the order they were made
        self.on_death: list[Callable[[], None]] = []
        self._rng = rng
        self._clock_offset_s = rng.uniform(0.0, 1000.0)
        self._overslept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tick_at = float("inf")  # in the queue's time
        self._is_arming = False

    def __str__(self) -> str:
        return self._label

    def now(self) -> float:
        """This process's own monotonic clock."""
        return self.queue.now + self._clock_offset_s

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        queue = self.queue
        queue.push(queue.now + delay_s, self._wake, (call, args))

    # ---- what becomes of it

    def stop(self) -> None:
        """SIGSTOP: some of what it posted has not left it yet."""
        self.is_stopped = True
        for endpoint in self.endpoints:
            endpoint.hold_back_unsent()

    def resume(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        self.undisturbed_since = self.queue.now
        overslept, self._overslept = self._overslept, []
        for call, args in overslept:
            self.later(self._rng.random() * _WAKE_UP_S, call, *args)
        for endpoint in self.endpoints:
            endpoint.resume(self._rng.random() * _WAKE_UP_S)

    def die(self) -> None:
        """SIGKILL: streams end, some of what was under way is lost."""
        self.is_alive = False
        for endpoint in list(self.endpoints):
            endpoint.cut()
        self._end()

    def leave(self) -> None:
        """A clean exit: what was posted arrives before the streams end."""
        for endpoint in list(self.endpoints):
            endpoint.close()
        self.is_alive = False
        self._end()

    def _end(self) -> None:
        self._overslept.clear()
        for call in self.on_death:
            call()
        self.on_death.clear()

    def jump(self, seconds: float) -> None:
        """Its clock goes forward at once."""
        self._clock_offset_s += seconds
        self.undisturbed_since = self.queue.now
        self._arm()

    # ---- the timer

    def next_deadline(self) -> float | None:
        """In this process's own clock."""
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def arm(self) -> None:
        """Deadlines may have changed."""
        if not self._is_arming:
            self._is_arming = True
            self.queue.push(self.queue.now + _ARM_S, self._wake, (self._arm, ()))

    def _arm(self) -> None:
        """Keep a timer that is due no later than the next deadline; one that is too early does nothing."""
        self._is_arming = False
        due = self.next_deadline()
        if due is None:
            return
        at = due - self._clock_offset_s + _EPSILON_S
        if at < self._tick_at:
            self._tick_at = at
            self.queue.at(at, self._wake, self._on_timer, ())

    def _on_timer(self) -> None:
        self._tick_at = float("inf")
        due = self.next_deadline()
        if due is not None and due <= self.now():
            self.tick()
        self._arm()

    def _wake(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._overslept.append((call, args))
        else:
            call(*args)
