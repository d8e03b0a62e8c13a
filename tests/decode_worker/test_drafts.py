"""Rows that may bring drafts: which do, how far, and how several tokens of a step are booked and told."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.guesses import Guesses
from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.draft_policy import MOST_DRAFTS, MOST_ROWS
from cluster.engine.speculation import told
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from cluster.wire.messages import Grant, Tokens
from cluster.worker_io import StepDone
from decode_worker.core import DecodeConfig, DecodeCore
from tests.support.decode_bench import DecodeBench
from tests.support.scripted_model import VOCABULARY, ScriptedRunner
from tests.support.worker_messages import plan_of, reserve, step_done, to_router


class GuessingRunner(ScriptedRunner):
    """Beside what `ScriptedRunner` does, it computes guesses, right and wrong ones."""

    def __init__(self, inner: ScriptedRunner, seed: int) -> None:
        super().__init__(inner.pool, inner._oracles)
        oracles = inner._oracles
        self.guesses = Guesses(random.Random(seed), lambda row: oracles[row.request].tokens, VOCABULARY)
        self._drafted: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        self._drafted = self.guesses.draft(plan)
        super().begin(self._drafted)

    def finish(self, plan: StepPlan) -> StepOutput:
        assert self._drafted is not None
        output = super().finish(self._drafted)
        self.guesses.learn(self._drafted, output)
        return told(self._drafted, output)


@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(9, 40),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=6),
)
def test_any_guesses_give_the_tokens_of_the_undisturbed_run(
    seed: int, num_blocks: int, lengths: list[tuple[int, int]]
) -> None:
    """Under preemption, too, with all blocks checked at each step."""
    bench = DecodeBench(num_blocks, speculates=True)
    bench.runner = GuessingRunner(bench.runner, seed)
    for index, (prompt, most) in enumerate(lengths):
        if bench.add([index] * prompt, most + 1) is None:
            break
        bench.step()
    bench.run()


def test_guesses_that_are_right_make_for_fewer_steps() -> None:
    bench = DecodeBench(40, speculates=True)
    bench.runner = GuessingRunner(bench.runner, 1)
    bench.add([1, 2, 3], 60)
    steps = 0
    while bench.step() is not None:
        steps += 1
    bench.run()
    assert steps < 45
    assert bench.runner.guesses.num_right > 15


def test_drafts_reach_as_far_as_blocks_and_tokens_do() -> None:
    bench = DecodeBench(40, speculates=True)
    roomy, short = bench.add([1] * 5, 60, growth=0), bench.add([2] * 5, 4, growth=0)
    assert roomy is not None
    assert short is not None
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert plan.longest_s > 0
    assert [(row.start, row.end) for row in plan.rows] == [(5, 12), (5, 8)]  # it has taken another block
    assert short.max_tokens_with_kv == 8
    full = DecodeBench(2, speculates=True)
    assert full.add([1] * 5, 60, growth=0) is not None
    plan = full.scheduler.plan(0.0)
    assert plan is not None
    assert plan.rows[0].end == 8  # no block is taken early that others may need
    assert MOST_DRAFTS > 4


def test_who_brings_no_drafts() -> None:
    def longest_s(bench: DecodeBench) -> float:
        plan = bench.scheduler.plan(0.0)
        assert plan is not None
        assert all(row.end == 0 for row in plan.rows) or plan.longest_s
        return plan.longest_s

    off, many, mixed = DecodeBench(99), DecodeBench(99, speculates=True), DecodeBench(99, speculates=True)
    off.add([1] * 5, 9)
    for index in range(MOST_ROWS + 1):
        many.add([index] * 5, 9)
    mixed.add([1] * 5, 9)
    mixed.add([2] * 5, 9, ready=False)
    assert (longest_s(off), longest_s(many), longest_s(mixed)) == (0.0, 0.0, 0.0)


def test_several_tokens_of_a_step_are_one_row_and_end_where_the_request_does() -> None:
    blocks = BlockManager(64, 4, "m")
    one = DecodeCore(DecodeConfig(block_bytes=10, speculates=True), blocks)
    params = SamplingParams(max_tokens=9, eos_token_ids=(0,))
    plan = None
    for request in ("r1", "r2"):
        actions = one.handle(reserve([1, 2, 3], request=request, local=True, params=params), 0.0)
        assert to_router(actions, Grant)
        plan = plan_of(actions) or plan
    for _ in range(20):
        assert plan is not None
        if len(plan.rows) == 2 and all(row.start >= 3 for row in plan.rows):
            break
        plan = plan_of(one.handle(step_done(plan), 0.0))
    assert plan is not None
    before = [row.start for row in plan.rows]
    output = StepOutput(
        (TokenOutput(7), TokenOutput(8)),
        0.01,
        further={1: (TokenOutput(9), TokenOutput(0))},
        num_drafted=5,
    )
    actions = one.handle(StepDone(output), 1.0)
    (tokens,) = to_router(actions, Tokens)
    assert [[token.token_id for token in row.outputs] for row in tokens.rows] == [[7], [8, 9, 0]]
    assert [row.finish_reason for row in tokens.rows] == [None, FinishReason.STOP]
    assert [row.index for row in tokens.rows] == [start - 2 for start in before]
    load = one.load()
    assert (load.drafts, load.right_drafts, load.running) == (5, 2, 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_step_that_went_on_has_the_history_of_all_its_tokens(is_cancelled: bool) -> None:
    bench = DecodeBench(40, speculates=True)
    sequence = bench.add([1] * 5, 30, growth=3)
    assert sequence is not None
    assert bench.scheduler.plan(0.0) is not None
    if is_cancelled:
        bench.scheduler.cancel(sequence)
    output = StepOutput((TokenOutput(7),), 0.01, further={0: (TokenOutput(8), TokenOutput(9))}, num_drafted=4)
    new = bench.scheduler.account(output, 0.0, went_on=True)
    assert [[output.token_id for output in one.outputs] for one in new] == (
        [] if is_cancelled else [[7, 8, 9]]
    )
    assert sequence.token_ids[-3:] == [7, 8, 9]
    assert sequence.num_remaining == 1
    assert bench.scheduler.book.busy
