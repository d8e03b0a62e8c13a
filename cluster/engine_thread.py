"""The one thread that computes: takes a plan, runs it, hands the outcome back to the event loop.

1. The thread loads the model and calibrates: `loaded` tells the event loop how long steps take here.
2. The event loop calls `submit(plan)`; at most one plan is in flight.
3. The thread runs it; the GIL is released, so messages go on being handled meanwhile.
4. `StepDone` or `StepFailed` is scheduled on the loop. After a `DeviceLost`, `on_stuck` is called as well.
5. With leave given before (`allow`), the thread goes on to the next step at once, if it is the same rows'
   (`cluster.engine.following`): what follows a step on the loop, and its message, then cost no time between
   steps. Before a step ends, and before anything is sampled that looks at histories, the loop has dealt with
   the one before: they are complete then, and leave is given (`Runner.run`). What is waited for that is no
   time that the step computed (`StepOutput.compute_s`).
6. A step that outlives its deadline (`cluster.step_watchdog`) cannot be stopped from outside: `on_stuck` is
   called, and the process is expected to end (its launcher starts another with the next epoch).
7. `close` returns when the thread has ended, and with it the model. The interpreter ends a thread that still
   frees tensors while it exits, and the C++ in that thread's stack then aborts the process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from cluster.engine.batch import Runner, StepPlan
from cluster.engine.following import following_plan
from cluster.errors import DeviceLost, StepError
from cluster.step_model import StepModel
from cluster.step_watchdog import MIN_S, StepWatchdog
from cluster.worker_io import StepDone, StepFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")


LATE_S = 0.25  # a timer this late says that the whole process stood still, not the step


class _Watched(msgspec.Struct, frozen=True):
    """The step in flight, and when it counts as stuck."""

    plan: StepPlan
    limit_s: float
    due: float  # in the loop's time


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`make_runner` loads the model and `calibrate` says how long its steps take; both run on the engine
        thread, which thereby owns every thread-local compute setting. `clock`: as runners measure."""
        self._make_runner = make_runner
        self._calibrate = calibrate
        self._on_outcome = on_outcome
        self._on_stuck = on_stuck
        self._judge = StepWatchdog(step_timeout_s, min_step_timeout_s)
        self._clock = clock
        self._waited_s = 0.0  # for histories, within the step that runs
        self._loop = asyncio.get_running_loop()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._watched: _Watched | None = None  # the step in flight
        self._watchdog: asyncio.TimerHandle | None = None
        self._watchdog_due = 0.0
        self._may_go_on = self._is_closing = False
        self._untold = threading.Lock()  # held from a step that goes on until the loop has dealt with it
        self._loaded: asyncio.Future[StepModel | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    async def loaded(self) -> StepModel | None:
        """Wait until the model is loaded; how long its steps take, if that was to be found out. Raises what
        the loading raised."""
        return await asyncio.shield(self._loaded)

    def submit(self, plan: StepPlan) -> None:
        """Start a step. The core promises that none is in flight."""
        assert self._watched is None, "two steps in flight"
        self._may_go_on = False
        self._watch(plan, self._judge.limit_s(plan))
        self._plans.put(plan)

    def allow(self, may_go_on: bool) -> None:
        """Whether the step in flight may be followed by one with the same rows. Holds for one step: after a
        `StepDone` that went on it is to be said anew, within `on_outcome`."""
        self._may_go_on = may_go_on and not self._is_closing

    async def close(self, timeout_s: float) -> None:
        """Let the step in flight end, then end the thread; gives up after `timeout_s`."""
        self._is_closing = True
        self.allow(False)
        self._plans.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            logger.warning("the step in flight did not end within %.0f s; leaving it behind", timeout_s)
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _watch(self, plan: StepPlan, limit_s: float) -> None:
        """There is one timer for all steps, due no later than the step in flight: one that is too early looks
        again, so a step costs no timer of its own."""
        due = self._loop.time() + limit_s
        self._watched = _Watched(plan, limit_s, due)
        if self._watchdog is None or due < self._watchdog_due:
            self._look_at(due)

    def _look_at(self, due: float) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog_due = due  # a timer of uvloop that is due at once does not say when
        self._watchdog = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._watchdog = None
        watched, now = self._watched, self._loop.time()
        if watched is None:
            return
        if now < watched.due:
            self._look_at(watched.due)
        elif now - watched.due > LATE_S:  # the step stood still with us: its time starts anew
            self._watch(watched.plan, watched.limit_s)
        else:
            rows, num_tokens = len(watched.plan.rows), watched.plan.num_tokens
            limit = f"{watched.limit_s:.1f} s"
            self._on_stuck(f"a step of {rows} rows, {num_tokens} tokens did not end within {limit}")

    def _outcome(self, outcome: StepDone | StepFailed, following: StepPlan | None) -> None:
        watched, self._watched = self._watched, None
        if isinstance(outcome, StepDone):
            assert watched is not None, "a step ended that nobody watched"
            self._judge.observe(watched.plan, outcome.output.compute_s)
        if following is None:
            self._on_outcome(outcome)
            return
        self._watch(following, self._judge.limit_s(following))
        self._on_outcome(outcome)
        self._untold.release()

    def _main(self) -> None:
        try:
            runner = self._make_runner()
            model = None if self._calibrate is None else self._calibrate(runner)
        except BaseException as error:  # handed to `loaded`, which raises it on the loop
            self._post(_fail, self._loaded, error)
            return
        self._post(_resolve, self._loaded, model)
        while (plan := self._plans.get()) is not None:
            following = self._step(runner, plan, None)
            while following is not None:
                following = self._step(runner, following, self._await_history)

    def _step(
        self, runner: Runner, plan: StepPlan, await_history: Callable[[], object] | None
    ) -> StepPlan | None:
        """Run a step and hand its outcome over; what to run next without being asked."""
        following = None
        outcome: StepDone | StepFailed
        lost: str | None = None
        try:
            self._waited_s = 0.0
            output = runner.run(plan, await_history)
            if self._waited_s:
                output = msgspec.structs.replace(
                    output, compute_s=max(0.0, output.compute_s - self._waited_s)
                )
            if self._may_go_on:
                self._may_go_on = False
                following = following_plan(plan, output)
            outcome = StepDone(output, went_on=following is not None)
        except (StepError, DeviceLost) as error:  # sentences that say it all
            logger.error("%s", error)
            outcome = StepFailed(str(error))
            lost = str(error) if isinstance(error, DeviceLost) else None
        except Exception as error:  # the loop's top: the step's requests fail, the worker goes on
            logger.exception("a step of %d rows failed", len(plan.rows))
            outcome = StepFailed(f"{type(error).__name__}: {error}")
        if following is not None:
            self._untold.acquire()
        self._post(self._outcome, outcome, following)
        if lost is not None:
            self._post(self._on_stuck, lost)
        return following

    def _await_history(self) -> None:
        """Until the loop has dealt with the step before; it does as long as it lives, and the process ends
        with it."""
        if self._untold.acquire(blocking=False):  # as nearly always
            self._untold.release()
            return
        since_s = self._clock()
        with self._untold:
            self._waited_s += self._clock() - since_s

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
