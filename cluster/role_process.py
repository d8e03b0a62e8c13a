"""One role in one process: from its configuration to the end of its service.

1. `load_entry` imports the role's service: a coroutine function `run(config, *, stop, on_ready)`. That of a
   router that plans roles takes `on_wish`, too: how it asks for a worker in another role.
2. `run_service` runs it in an event loop of its own until it returns; setting `stop` asks it to drain and
   return. `on_ready` is called once: a worker has loaded its model and dials the routers, a router's
   `/ready` turned 200.
3. `serve_role` does both, with the logging the configuration asks for. Every way to start a role ends there:
   the Ray actors of `cluster.launch_actors`, the local launcher's processes (`cluster.role_launched`), and
   `python -m router | prefill_worker | decode_worker` by hand (`cluster.role_cli`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cluster.errors import BatonError
from cluster.logging_setup import configure_logging
from cluster.role_config import RouterConfig, WorkerConfig

FORCED_EXIT_CODE = 130

logger = logging.getLogger(__name__)


OnWish = Callable[[str, str], None]  # (worker, role)


class ServiceEntry(Protocol):
    """What a role's `service` module exports as `run`."""

    def __call__(
        self, config: Any, *, stop: asyncio.Event, on_ready: Callable[[], None] | None = None, **more: OnWish
    ) -> Coroutine[Any, Any, None]: ...


class StopSwitch:
    """A stop request from any thread to a service's loop. `request` may come before the loop runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_requested = False
        self._bound: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def request(self) -> None:
        with self._lock:
            self._is_requested = True
            if self._bound is not None:
                loop, event = self._bound
                with contextlib.suppress(RuntimeError):  # the loop has just closed: it stopped by itself
                    loop.call_soon_threadsafe(event.set)

    def responds(self, timeout_s: float) -> bool:
        """Whether the service's loop runs a callback within `timeout_s`; True while there is none."""
        answered = threading.Event()
        with self._lock:
            if self._bound is None:
                return True
            try:
                self._bound[0].call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop has just closed: it ended, it does not hang
                return True
        return answered.wait(timeout_s)

    def bind(self) -> asyncio.Event:
        """The event of the running loop that a request sets."""
        event = asyncio.Event()
        with self._lock:
            self._bound = (asyncio.get_running_loop(), event)
            if self._is_requested:
                event.set()
        return event


def load_entry(entry: str) -> ServiceEntry:
    """`module:function` → the function."""
    module, _, name = entry.partition(":")
    service: ServiceEntry = getattr(importlib.import_module(module), name)
    return service


def run_service(
    service: ServiceEntry,
    config: RouterConfig | WorkerConfig,
    switch: StopSwitch,
    on_ready: Callable[[], None] | None = None,
    on_wish: OnWish | None = None,
) -> None:
    """Run the service in this thread until it returns; its exceptions pass through."""

    more: dict[str, OnWish] = {}
    if isinstance(config, RouterConfig) and config.plans_roles and on_wish is not None:
        more["on_wish"] = on_wish

    async def serve() -> None:
        await service(config, stop=switch.bind(), on_ready=on_ready, **more)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve())


def one_line(error: BaseException) -> str:
    """The root cause, fit to show to a person: our own errors are sentences, others are named."""
    text = " ".join(str(error).split())
    if isinstance(error, BatonError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def serve_role(
    entry: str,
    config: RouterConfig | WorkerConfig,
    switch: StopSwitch,
    on_ready: Callable[[], None],
    on_wish: OnWish | None = None,
) -> str:
    """What every process of a role does, whoever started it: log as configured and serve until the end.

    Returns why it ended, one line that is also logged; "" after a stop.
    """
    name = config.router if isinstance(config, RouterConfig) else config.worker

    def ready() -> None:
        gc.collect()
        gc.freeze()  # what was loaded stays: collections need not look at it, which stops a worker for 0.1 s
        logger.info("%s is ready", name)
        on_ready()

    try:
        configure_logging(config.log, name)
        run_service(load_entry(entry), config, switch, ready, on_wish)
    except BatonError as error:
        logger.error("%s", error)
        return one_line(error)
    except Exception as error:  # the top of the role: whatever happened ends this process
        logger.exception("the service ended with an error")
        return one_line(error)
    return ""


def stop_on_signals(switch: StopSwitch) -> None:
    """The first SIGINT or SIGTERM asks the service to drain; the second ends the process at once."""
    num_signals = 0

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(FORCED_EXIT_CODE)
        switch.request()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it halves the cost of a message."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
