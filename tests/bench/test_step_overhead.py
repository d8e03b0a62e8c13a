"""What `bench.step_overhead` measures happens as on a worker: the core plans, gives leave, and is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from bench.step_overhead import BATCH_SIZES, Worker
from cluster.engine.batch import PlainOutputs, StepOutput, StepPlan
from cluster.engine.following import FollowingRows


class Runner:
    """Every token is 7."""

    def __init__(self) -> None:
        self._packer = SimpleNamespace(pack=lambda rows: None)
        self.starts: list[list[int]] = []
        self.num_on = 0

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        self.starts.append([row.start for row in plan.rows])
        assert (await_history is None) is not isinstance(plan.rows, FollowingRows)
        if await_history is not None:
            self.num_on += 1
            await_history()
        return StepOutput(PlainOutputs([7] * len(plan.rows)), 0.05)


@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_steps_are_planned_or_go_on_and_each_row_gets_a_token_in_each(num_seqs: int) -> None:
    runner = Runner()
    worker = Worker(num_seqs, 100, {"temperature": 0.0}, runner)  # type: ignore[arg-type]
    for _ in range(5):
        worker.planned_step()
    assert runner.num_on == 0
    num_on = sum(worker.step_that_goes_on() for _ in range(40))
    assert num_on == runner.num_on > 35  # of the others, one in which some took blocks
    first = runner.starts[0]
    assert runner.starts == [[start + step for start in first] for step in range(46)]
    assert worker.began_s < worker.accounted_s < worker.told_s
    told = {one.num_generated for one in worker._core._scheduler.sequences()}
    assert told == {1 + 45}  # of all steps but the last
    assert len(set(first)) == num_seqs


def test_a_row_leaves_and_comes_back_by_turns() -> None:
    runner = Runner()
    worker = Worker(3, 100, {"temperature": 0.0}, runner)  # type: ignore[arg-type]
    for _ in range(4):
        worker.changed_step()
    first, second, third = runner.starts[0]
    assert runner.starts[1:] == [
        [first + 1, second + 1],
        [first + 2, second + 2, third + 1],
        [first + 3, second + 3],
        [first + 4, second + 4, third + 2],
    ]
