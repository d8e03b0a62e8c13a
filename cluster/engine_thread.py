"""The one thread that computes: takes a plan, runs it, hands the outcome back to the event loop.

1. The thread loads the model and calibrates: `loaded` tells the event loop how long steps take here.
2. The event loop calls `submit(plan)`; at most one plan is in flight.
3. The thread runs it; torch releases the GIL, so messages go on being handled meanwhile.
4. `StepDone` or `StepFailed` is scheduled on the loop. After a `DeviceLost`, `on_stuck` is called as well.
5. A step that outlives its deadline (`cluster.step_watchdog`) cannot be stopped from outside: `on_stuck` is
   called, and the process is expected to end (its launcher starts another with the next epoch).
6. `close` returns when the thread has ended, and with it the model. The interpreter ends a thread that still
   frees tensors while it exits, and the C++ in that thread's stack then aborts the process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from cluster.engine.batch import Runner, StepPlan
from cluster.errors import DeviceLost, StepError
from cluster.step_model import StepModel
from cluster.step_watchdog import MIN_S, StepWatchdog
from cluster.worker_io import StepDone, StepFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATE_S = 0.25  # a timer this late says that the whole process stood still, not the step


class EngineThread:
    """Runs steps one at a time on a daemon thread (a stuck step must not keep the process alive)."""

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        *,
        calibrate: Callable[[Runner], StepModel] | None = None,
        on_outcome: Callable[[StepDone | StepFailed], None],
        on_stuck: Callable[[str], None],
        step_timeout_s: float,
        min_step_timeout_s: float = MIN_S,
    ) -> None:
        """`make_runner` loads the model and `calibrate` says how long its steps take; both run on the engine
        thread, which thereby owns every thread-local compute setting."""
        self._make_runner = make_runner
        self._calibrate = calibrate
        self._on_outcome = on_outcome
        self._on_stuck = on_stuck
        self._judge = StepWatchdog(step_timeout_s, min_step_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._watchdog: asyncio.TimerHandle | None = None
        self._loaded: asyncio.Future[StepModel | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    async def loaded(self) -> StepModel | None:
        """Wait until the model is loaded; how long its steps take, if that was to be found out. Raises what
        the loading raised."""
        return await asyncio.shield(self._loaded)

    def submit(self, plan: StepPlan) -> None:
        """Start a step. The core promises that none is in flight."""
        assert self._watchdog is None, "two steps in flight"
        self._watch(plan, self._judge.limit_s(plan))
        self._plans.put(plan)

    async def close(self, timeout_s: float) -> None:
        """Let the step in flight end, then end the thread; gives up after `timeout_s`."""
        self._plans.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            logger.warning("the step in flight did not end within %.0f s; leaving it behind", timeout_s)
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _watch(self, plan: StepPlan, limit_s: float) -> None:
        due = self._loop.time() + limit_s
        self._watchdog = self._loop.call_at(due, self._look, plan, limit_s, due)

    def _look(self, plan: StepPlan, limit_s: float, due: float) -> None:
        if self._loop.time() - due > LATE_S:  # the step stood still with us: its time starts anew
            self._watch(plan, limit_s)
            return
        self._on_stuck(
            f"a step of {len(plan.rows)} rows, {plan.num_tokens} tokens did not end within {limit_s:.1f} s"
        )

    def _outcome(self, plan: StepPlan, outcome: StepDone | StepFailed) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if isinstance(outcome, StepDone):
            self._judge.observe(plan, outcome.output.compute_s)
        self._on_outcome(outcome)

    def _main(self) -> None:
        try:
            runner = self._make_runner()
            model = None if self._calibrate is None else self._calibrate(runner)
        except BaseException as error:  # handed to `loaded`, which raises it on the loop
            self._post(_fail, self._loaded, error)
            return
        self._post(_resolve, self._loaded, model)
        while (plan := self._plans.get()) is not None:
            outcome: StepDone | StepFailed
            lost: str | None = None
            try:
                outcome = StepDone(runner.run(plan))
            except (StepError, DeviceLost) as error:  # sentences that say it all
                logger.error("%s", error)
                outcome = StepFailed(str(error))
                lost = str(error) if isinstance(error, DeviceLost) else None
            except Exception as error:  # the loop's top: the step's requests fail, the worker goes on
                logger.exception("a step of %d rows failed", len(plan.rows))
                outcome = StepFailed(f"{type(error).__name__}: {error}")
            self._post(self._outcome, plan, outcome)
            if lost is not None:
                self._post(self._on_stuck, lost)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process is ending and nobody waits any more
            logger.debug("engine outcome after the event loop closed")


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
