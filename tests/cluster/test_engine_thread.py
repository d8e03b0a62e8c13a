"""The engine thread: failures survived, and a stuck step found without blaming slow ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import Row, SampleSpec, StepOutput, StepPlan
from cluster.engine_thread import EngineThread
from cluster.errors import DeviceLost, StepError
from cluster.ids import Attempt, RequestId
from cluster.sampling import SamplingParams, TokenOutput
from cluster.step_model import StepModel
from cluster.step_watchdog import FACTOR, StepWatchdog
from cluster.worker_io import StepDone, StepFailed

ROOT = Path(__file__).parents[2]
MODEL = StepModel(1e-3, 2e-3, 3e-5, 4e-8, 5e-9)


def plan(*lengths: int, start: int = 0) -> StepPlan:
    rows = [
        Row(RequestId(f"r{index}"), Attempt(1), [1] * num, start, [], None)
        for index, num in enumerate(lengths)
    ]
    return StepPlan(tuple(rows))


class Runner:
    """Runs what the test gives it for each step."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = list(steps)

    def run(self, plan: StepPlan, await_history: Callable[[], None] | None = None) -> StepOutput:
        self._steps.pop(0)()
        return StepOutput((None,) * len(plan.rows), 0.001)


def fail() -> None:
    raise ValueError("out of memory")


class Engine:
    """An engine thread whose outcomes can be awaited."""

    def __init__(self, runner: Runner, **limits: float) -> None:
        self.outcomes: asyncio.Queue[StepDone | StepFailed] = asyncio.Queue()
        self.stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.thread = EngineThread(
            lambda: runner,
            on_outcome=self.outcomes.put_nowait,
            on_stuck=self.stuck.set_result,
            **{"step_timeout_s": 60.0, **limits},
        )

    async def run(self, plan: StepPlan) -> StepDone | StepFailed:
        self.thread.submit(plan)
        return await asyncio.wait_for(self.outcomes.get(), 30)


async def test_a_failed_step_is_an_outcome_and_the_next_one_runs() -> None:
    engine = Engine(Runner(fail, lambda: None))
    failed = await engine.run(plan(1))
    assert isinstance(failed, StepFailed)
    assert failed.message == "ValueError: out of memory"
    assert isinstance(await engine.run(plan(1)), StepDone)
    await engine.thread.close(20.0)


async def test_an_error_that_is_a_sentence_stays_one_and_a_lost_device_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run_out() -> None:
        raise StepError("a step of 1 rows ran out of GPU memory")

    def fault() -> None:
        raise DeviceLost("the GPU faulted")

    engine = Engine(Runner(run_out, lambda: None, fault))
    failed = await engine.run(plan(1))
    assert isinstance(failed, StepFailed)
    assert failed.message == "a step of 1 rows ran out of GPU memory"
    assert "Traceback" not in caplog.text
    assert isinstance(await engine.run(plan(1)), StepDone)
    assert not engine.stuck.done()
    lost = await engine.run(plan(1))
    assert isinstance(lost, StepFailed)
    assert lost.message == "the GPU faulted"
    assert await asyncio.wait_for(engine.stuck, 30) == "the GPU faulted"
    await engine.thread.close(20.0)


async def test_the_runner_is_calibrated_before_anybody_hears_of_it() -> None:
    loop = asyncio.get_running_loop()
    seen: list[object] = []

    def calibrate(runner: object) -> StepModel:
        seen.append(runner)
        return MODEL

    runner = Runner()
    thread = EngineThread(
        lambda: runner,
        calibrate=calibrate,
        on_outcome=lambda outcome: None,
        on_stuck=loop.create_future().set_result,
        step_timeout_s=60.0,
    )
    assert await thread.loaded() == MODEL
    assert seen == [runner]
    await thread.close(20.0)
    silent = Engine(Runner())
    assert await silent.thread.loaded() is None
    await silent.thread.close(20.0)


class SlowToGo(Runner):
    """Takes a while to free what it has."""

    def __init__(self, gone: threading.Event) -> None:
        super().__init__()
        self._gone = gone

    def __del__(self) -> None:
        time.sleep(0.2)
        self._gone.set()


async def test_close_waits_until_the_runner_is_gone() -> None:
    gone = threading.Event()
    thread = EngineThread(
        lambda: SlowToGo(gone),
        on_outcome=lambda outcome: None,
        on_stuck=asyncio.get_running_loop().create_future().set_result,
        step_timeout_s=60.0,
    )
    await thread.loaded()
    await thread.close(30.0)
    assert gone.is_set()


PROCESS = """
import asyncio, ctypes, weakref
import torch
from cluster.engine_thread import EngineThread

class Runner:  # its memory is given back by C++ that calls Python, without the interpreter's lock for 0.3 s
    def __init__(self):
        memory = (ctypes.c_char * 4096)()
        weakref.finalize(memory, ctypes.CDLL(None).usleep, 300_000).atexit = False
        self.weights = torch.frombuffer(memory, dtype=torch.uint8)

async def main():
    engine = EngineThread(Runner, on_outcome=print, on_stuck=print, step_timeout_s=60.0)
    await engine.loaded()
    await engine.close(30.0)

asyncio.run(main())
"""


def test_a_process_that_closed_its_engine_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_step_that_hangs_is_found_by_what_steps_take_here() -> None:
    release = threading.Event()
    engine = Engine(Runner(lambda: None, lambda: release.wait(30) and None), min_step_timeout_s=0.2)
    await engine.run(plan(1))
    engine.thread.submit(plan(1, 1))
    reason = await asyncio.wait_for(engine.stuck, 30)  # not after the 60 s of a step that is not measured
    assert reason.startswith("a step of 2 rows, 2 tokens did not end within 0.2 s")
    release.set()
    await engine.thread.close(20.0)


async def test_steps_have_no_timers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, set_for = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def note(when: float, callback: Callable[..., object], *args: object, **more: Any) -> asyncio.TimerHandle:
        if callback == engine.thread._look:
            set_for.append(when)
        return call_at(when, callback, *args, **more)

    monkeypatch.setattr(loop, "call_at", note)
    engine = Engine(Runner(*[lambda: None] * 20), min_step_timeout_s=30.0)  # it is not due meanwhile
    for _ in range(20):
        assert isinstance(await engine.run(plan(1)), StepDone)
    assert len(set_for) == 2  # for the longest limit, as nothing is measured; then for the least
    await engine.thread.close(20.0)


async def test_a_timer_that_does_not_say_when_it_is_due_is_good_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop gives a plain handle for what is due within half a millisecond."""
    loop, call_at = asyncio.get_running_loop(), asyncio.get_running_loop().call_at

    def plain(when: float, callback: Callable[..., object], *args: object, **more: Any) -> asyncio.Handle:
        timer = call_at(when, callback, *args, **more)
        if callback != engine.thread._look:
            return timer
        monkeypatch.setattr(loop, "call_at", call_at)
        timer.cancel()
        return asyncio.Handle(callback, args, loop)

    monkeypatch.setattr(loop, "call_at", plain)
    engine = Engine(Runner(*[lambda: None] * 3))
    for _ in range(3):
        assert isinstance(await engine.run(plan(1)), StepDone)
    await engine.thread.close(20.0)


async def test_a_process_that_stood_still_does_not_blame_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From within, a process that was stopped sees a clock that jumped."""
    loop, slept_s = asyncio.get_running_loop(), 0.0
    true_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: true_time() + slept_s)
    release = threading.Event()
    engine = Engine(Runner(lambda: None, lambda: release.wait(30) and None), min_step_timeout_s=20.0)
    await engine.run(plan(1))
    engine.thread.submit(plan(1))
    submitted = engine.thread._watched
    assert submitted is not None
    slept_s = 60.0
    while engine.thread._watched is submitted:  # until the watchdog has looked
        await asyncio.sleep(0)
    release.set()
    outcome = await asyncio.wait_for(engine.outcomes.get(), 30)
    assert isinstance(outcome, StepDone)
    assert not engine.stuck.done()
    await engine.thread.close(20.0)


class Counting:
    """A runner whose rows sample: the n-th step gives token n, once histories are complete."""

    def __init__(self, fail_at: int = 0) -> None:
        self.plans: list[StepPlan] = []
        self.has_leave = threading.Event()  # it was said whether the first step may go on
        self._fail_at = fail_at

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        self.plans.append(plan)
        if len(self.plans) == self._fail_at:
            raise ValueError("out of memory")
        assert self.has_leave.wait(30)
        if await_history is not None:
            await_history()
        return StepOutput((TokenOutput(len(self.plans)),) * len(plan.rows), 0.001)


class GoingOn:
    """An engine thread and a core that books tokens, and gives leave for as many steps as the test says."""

    def __init__(
        self,
        runner: Counting,
        max_tokens: int,
        leaves: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.before_outcome: Callable[[StepDone | StepFailed], None] = lambda outcome: None
        self.outcomes: list[StepDone | StepFailed] = []
        self.runner = runner
        self.history: list[int] = []
        self.leaves = leaves
        self.ended = asyncio.Event()
        self.thread = EngineThread(
            lambda: runner,
            on_outcome=self.on_outcome,
            on_stuck=lambda reason: None,
            step_timeout_s=60.0,
            clock=clock,
        )
        spec = SampleSpec(SamplingParams(max_tokens=max_tokens), [1], self.history)
        self.plan = StepPlan((Row(RequestId("r"), Attempt(1), [1], 0, [], spec),))

    def on_outcome(self, outcome: StepDone | StepFailed) -> None:
        self.before_outcome(outcome)
        self.outcomes.append(outcome)
        if isinstance(outcome, StepDone):
            token = outcome.output.outputs[0]
            assert token is not None
            self.history.append(token.token_id)
            if outcome.went_on:
                self._allow()
                return
        self.ended.set()

    async def run(self) -> list[bool]:
        """Whether each step went on."""
        await self.thread.loaded()
        self.thread.submit(self.plan)
        self._allow()
        self.runner.has_leave.set()
        await asyncio.wait_for(self.ended.wait(), 30)
        await self.thread.close(20.0)
        return [isinstance(outcome, StepDone) and outcome.went_on for outcome in self.outcomes]

    def _allow(self) -> None:
        self.thread.allow(self.leaves > 0)
        self.leaves -= 1


async def test_steps_go_on_by_themselves_until_a_row_ends() -> None:
    runner = Counting()
    engine = GoingOn(runner, max_tokens=5, leaves=100)
    assert await engine.run() == [True, True, True, True, False]
    assert engine.history == [1, 2, 3, 4, 5]
    assert [plan.rows[0].start for plan in runner.plans] == [0, 1, 2, 3, 4]
    assert [list(plan.rows[0].token_ids) for plan in runner.plans] == [[1], [1], [2], [3], [4]]


@pytest.mark.parametrize("leaves", [0, 1, 3])
async def test_leave_holds_for_one_step(leaves: int) -> None:
    engine = GoingOn(Counting(), max_tokens=9, leaves=leaves)
    assert await engine.run() == [True] * leaves + [False]


async def test_a_step_that_was_not_asked_for_fails_as_any_other() -> None:
    engine = GoingOn(Counting(fail_at=2), max_tokens=9, leaves=9)
    assert await engine.run() == [True, False]
    assert engine.outcomes[1] == StepFailed("ValueError: out of memory")


class Clock:
    """Stands still unless it is moved; says when it is read within a step that waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits = threading.Event()

    def __call__(self) -> float:
        self.waits.set()
        return self.now_s


class Timed(Counting):
    """Computes for a second before it needs the history, and for a second after."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        started_s = self._clock.now_s
        self._clock.now_s += 1.0
        output = super().run(plan, await_history)
        self._clock.now_s += 1.0
        return StepOutput(output.outputs, self._clock.now_s - started_s)


async def test_a_step_that_waits_for_the_loop_has_not_computed_meanwhile() -> None:
    clock = Clock()
    engine = GoingOn(Timed(clock), max_tokens=3, leaves=9, clock=clock)

    def stall(outcome: StepDone | StepFailed) -> None:
        if isinstance(outcome, StepDone) and outcome.went_on:
            assert clock.waits.wait(30)  # the next step has come as far as it can
            clock.waits.clear()
            clock.now_s += 100.0

    engine.before_outcome = stall
    assert await engine.run() == [True, True, False]
    outputs = [outcome.output for outcome in engine.outcomes if isinstance(outcome, StepDone)]
    assert [output.compute_s for output in outputs] == [2.0, 2.0, 2.0]
    assert clock.now_s == 206.0


def test_nothing_measured_means_the_longest_limit() -> None:
    assert StepWatchdog(60.0).limit_s(plan(512)) == 60.0


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 0), (512, 0), (512, 8192), (64, 100_000)])
def test_the_limit_grows_with_the_work(num_tokens: int, context: int) -> None:
    """A model that needs 10 ms a token: a long chunk over a long context is no hang."""
    judge = StepWatchdog(100_000.0, min_s=0.001)
    judge.observe(plan(*[1] * 8), 0.010 * (8 + 16))
    limit_s = judge.limit_s(plan(num_tokens, start=context))
    assert limit_s >= FACTOR * 0.0099 * num_tokens * (1 + context / 2048)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 20.0)), min_size=1, max_size=20))
def test_a_step_like_one_seen_is_never_stuck(steps: list[tuple[int, float]]) -> None:
    judge = StepWatchdog(60.0)
    for num_tokens, compute_s in steps:
        judge.observe(plan(num_tokens), compute_s)
        assert compute_s <= judge.limit_s(plan(num_tokens)) <= 60.0
        assert judge.limit_s(plan(num_tokens)) >= 2.5
