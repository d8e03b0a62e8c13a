"""The live driver of a worker: sockets, a timer and the engine thread around a sans-IO core.

1. It dials every router, says `Register`, and keeps dialing with backoff when a stream breaks. A second
   stream is given to whoever can hold it apart from the first (`keep_lifeline`): when this process is
   killed, one of the two ends at once.
2. Whatever arrives (a router's message, a KV peer's message, a finished step, a due timer) becomes one
   event: `core.handle(event, now)`, on the event loop, one at a time.
3. The actions go out: messages to streams, plans to the engine thread, the rest to the role's edges.
4. Heartbeats tell each router state and load at the interval it asked for; reports before them what is in the
   prefix cache (`cluster.cache_reports`).
5. On stop: the core is told to drain. The driver leaves when nothing runs; after the grace time the core
   hands back what is left, and the routers go on with it elsewhere.

A fault inside the core is not survivable: the driver ends, the process with it, the launcher starts the
next epoch, and the router retries what was here. Nothing is decided in this file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cluster.cache_reports import CacheReports
from cluster.clock import Clock
from cluster.engine.batch import Runner
from cluster.engine_thread import EngineThread
from cluster.errors import BatonError, ConfigError, ProtocolError, WireError
from cluster.ids import RouterId
from cluster.kv.block_manager import BlockManager
from cluster.step_model import StepModel
from cluster.wire.kv_events import KvResync, RouterSays
from cluster.wire.messages import Drain, Heartbeat, Lifeline, Refused, Register, Welcome, WorkerState
from cluster.wire.stream import Stream, connect
from cluster.worker_io import (
    Action,
    Calibrated,
    Event,
    FromRouter,
    RouterLost,
    RunStep,
    Tick,
    ToRouter,
    WorkerCore,
)

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_WELCOME_TIMEOUT_S = 10.0
_ENGINE_CLOSE_S = 5.0
_HAND_OVER_S = 0.5  # beyond the grace time: the core gives up what is left, and the routers are told


class Edges(Protocol):
    """The role's KV side: carries out the actions that concern peers and reports events."""

    def carry(self, action: Action) -> None: ...

    async def close(self) -> None: ...


class Held(Protocol):
    """A descriptor that closes when the process is killed, or here."""

    def close(self) -> None: ...


class WorkerDriver:
    """Owns the streams to the routers, the engine thread and the timer of one worker."""

    def __init__(
        self,
        *,
        core: WorkerCore,
        make_runner: Callable[[], Runner],
        calibrate: Callable[[Runner], StepModel] | None = None,
        cache: BlockManager | None = None,
        keep_lifeline: Callable[[int], Held | None] | None = None,
        token: bytes,
        router_addresses: Sequence[str],
        clock: Clock,
        step_timeout_s: float,
        join_timeout_s: float | None = None,
    ) -> None:
        self._core = core
        self._token = token
        self._router_addresses = router_addresses
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._streams: dict[RouterId, Stream[RouterSays]] = {}
        self._keep_lifeline = keep_lifeline
        self._lifelines: dict[str, Held] = {}  # by the router's address
        self._reports = None if cache is None else CacheReports(cache)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._in_handle = False
        self._last_state = core.state()
        self._idle = asyncio.Event()
        self._fatal: asyncio.Future[None] = self._loop.create_future()
        self._is_stuck = False
        self._join_timeout_s = join_timeout_s
        self._has_joined = False
        self._last_failure = ""  # to reach a router
        self._edges: Edges | None = None
        self._engine = EngineThread(
            make_runner,
            calibrate=calibrate,
            on_outcome=self.dispatch,
            on_stuck=self._stuck,
            step_timeout_s=step_timeout_s,
        )

    async def loaded(self) -> None:
        """Wait for the model; the core is told how long its steps take."""
        try:
            model = await self._engine.loaded()
        except Exception:
            await self._engine.close(timeout_s=_ENGINE_CLOSE_S)
            raise
        if model is not None:
            self.dispatch(Calibrated(model))

    async def run(self, register: Register, edges: Edges, stop: asyncio.Event, drain_grace_s: float) -> None:
        """Serve until `stop`, then drain.

        Raises:
            BatonError: a router refused this worker, none took it in `join_timeout_s`, a step got stuck,
                or the device was lost.
        """
        self._edges = edges
        join_timer = None
        if self._join_timeout_s is not None:
            join_timer = self._loop.call_later(self._join_timeout_s, self._check_joined)
        links = [asyncio.create_task(self._keep_link(a, register)) for a in self._router_addresses]
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        try:
            ends: list[asyncio.Future[None]] = [self._fatal, *links]
            await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
            await self._drain(drain_grace_s)
        finally:
            if join_timer is not None:
                join_timer.cancel()
            stopped.cancel()
            for link in links:
                link.cancel()
            await asyncio.gather(stopped, *links, return_exceptions=True)
            if self._timer is not None:
                self._timer.cancel()
            for stream in list(self._streams.values()):
                await stream.close()
            await edges.close()
            await self._engine.close(timeout_s=0.0 if self._is_stuck else _ENGINE_CLOSE_S)
            if not self._fatal.done():
                self._fatal.cancel()

    def dispatch(self, event: Event) -> None:
        """Feed one event to the core and carry out what it decides."""
        if self._fatal.done():
            return
        assert not self._in_handle, "an action was answered synchronously"
        self._in_handle = True
        now = self._clock.now()
        try:
            for action in self._core.handle(event, now):
                self._carry(action)
        except Exception as error:  # a fault in the core: end the process, the next epoch starts clean
            logger.exception("the worker core failed on %s", type(event).__name__)
            self._end(BatonError(f"internal fault while handling {type(event).__name__}: {error}"))
            return
        finally:
            self._in_handle = False
        self._after_event(now)

    def device_lost(self, reason: str) -> None:
        """An edge found that the device computes no more: this process ends, its launcher starts another."""
        self._is_stuck = True
        self._end(BatonError(f"the device is lost: {reason}"))

    # ---- actions -------------------------------------------------------------------------------

    def _carry(self, action: Action) -> None:
        if isinstance(action, ToRouter):
            stream = self._streams.get(action.router)
            if stream is None:  # the core learns of the loss by RouterLost and frees what it held
                logger.debug("dropped %s for a lost router", type(action.message).__name__)
            else:
                stream.post(action.message)
        elif isinstance(action, RunStep):
            self._engine.submit(action.plan)
        else:
            assert self._edges is not None
            self._edges.carry(action)

    def _after_event(self, now: float) -> None:
        self._engine.allow(self._core.may_go_on())
        state = self._core.state()
        if state is not self._last_state:
            self._last_state = state
            for stream in self._streams.values():
                self._beat(stream)
        if self._reports is not None and self._reports.is_due(now):
            self._report(now)
        if state is WorkerState.DRAINING:  # nobody else asks
            load = self._core.load()
            if load.running == 0 and load.waiting == 0:
                self._idle.set()
            else:
                self._idle.clear()
        self._arm(now)

    def _arm(self, now: float) -> None:
        """Keep one timer, due no later than the next deadline. One that is too early ticks for nothing."""
        due = self._core.next_deadline()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(0.0, due - now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.dispatch(Tick())

    def _stuck(self, reason: str) -> None:
        self._is_stuck = True
        self._end(BatonError(f"the engine is stuck: {reason}"))

    def _end(self, error: BatonError) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)

    def _check_joined(self) -> None:
        if not self._has_joined:
            reason = self._last_failure or "none took this worker in"
            limit = f"{self._join_timeout_s:g} s"
            self._end(ConfigError(f"no router within {limit}: {reason}; start one, or correct its address"))

    # ---- routers -------------------------------------------------------------------------------

    async def _keep_link(self, address: str, register: Register) -> None:
        failures = 0
        while True:
            try:
                stream = await connect(address, self._token, RouterSays)
            except (OSError, WireError, TimeoutError) as error:
                if failures == 0:
                    logger.warning("cannot reach the router at %s (%s); trying again", address, error)
                self._last_failure = str(error)
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            failures = 0
            try:
                await self._serve_link(address, stream, register)
            except WireError as error:
                logger.warning("stream to the router at %s broke: %s", address, error)
            finally:
                await stream.close()
                lifeline = self._lifelines.pop(address, None)
                if lifeline is not None:  # after the stream: the router reads that to its end
                    lifeline.close()
            await asyncio.sleep(_BACKOFF_S[0])

    async def _serve_link(self, address: str, stream: Stream[RouterSays], register: Register) -> None:
        stream.post(register)
        welcome = await _first_message(stream)
        if isinstance(welcome, Refused):
            raise ConfigError(f"the router refused worker `{register.worker}`: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"expected Welcome, got {type(welcome).__name__}")
        router = welcome.router
        self._has_joined = True
        self._streams[router] = stream
        if self._reports is not None:
            self._reports.joined(router)
        beats = asyncio.create_task(self._heartbeats(stream, welcome.heartbeat_interval_s))
        lifeline = asyncio.create_task(self._dial_lifeline(address, welcome.link))

        def take(message: RouterSays) -> bool:
            if isinstance(message, Refused):
                raise ConfigError(f"the router refused worker `{register.worker}`: {message.reason}")
            if isinstance(message, KvResync):
                if self._reports is not None:
                    self._reports.resync(router)
                self._report(self._clock.now())
            else:
                self.dispatch(FromRouter(router, message))
            return True

        try:
            await stream.pump(take)
        finally:
            beats.cancel()
            lifeline.cancel()
            if self._streams.get(router) is stream:
                del self._streams[router]
                if self._reports is not None:
                    self._reports.lost(router)
                self.dispatch(RouterLost(router))

    async def _dial_lifeline(self, address: str, link: int) -> None:
        if self._keep_lifeline is None or link == 0:
            return
        try:
            stream = await connect(address, self._token, RouterSays)
            held = await stream.hand_over(Lifeline(link=link), self._keep_lifeline)
        except (OSError, WireError, TimeoutError) as error:
            logger.warning("no lifeline to the router at %s: %s", address, error)
            return
        if held is None:
            logger.info(
                "this system cannot hold a lifeline: the router learns later if this process is killed"
            )
        else:
            self._lifelines[address] = held

    async def _heartbeats(self, stream: Stream[RouterSays], interval_s: float) -> None:
        while True:
            self._report(self._clock.now())
            self._beat(stream)
            await asyncio.sleep(interval_s)

    def _report(self, now: float) -> None:
        """What has changed in the cache, to all routers."""
        if self._reports is not None:
            for router, report in self._reports.due(now, force=True):
                self._streams[router].post(report)

    def _beat(self, stream: Stream[RouterSays]) -> None:
        stream.post(Heartbeat(state=self._core.state(), load=self._core.load()))

    async def _drain(self, grace_s: float) -> None:
        for router in list(self._streams):
            self.dispatch(FromRouter(router, Drain(grace_s=grace_s)))
        if self._core.state() is not WorkerState.DRAINING:
            return  # no router: nobody's request can be here
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s + _HAND_OVER_S)
        except TimeoutError:
            logger.warning("not drained within %.0f s; leaving", grace_s)


async def _first_message(stream: Stream[RouterSays]) -> RouterSays:
    async with asyncio.timeout(_WELCOME_TIMEOUT_S):
        async for message in stream:
            return message
    raise ProtocolError("the router closed the stream before Welcome")
