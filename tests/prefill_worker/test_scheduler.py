"""The prefill scheduler: budgets, blocks taken late, nobody starved by size."""

from __future__ import annotations

import pytest

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.prefill_order import PrefillOrder
from cluster.engine.sequence import Sequence
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams, TokenOutput
from prefill_worker.scheduler import PrefillScheduler, PrefillSchedulerConfig

ORDER = PrefillOrder(tokens_per_s=1000.0, aging_bound_s=5.0)


def prompt(order: int, num_tokens: int, *, first: int = 0, now: float = 0.0) -> Sequence:
    token_ids = [first + i for i in range(num_tokens)]
    params = SamplingParams(max_tokens=4)
    return Sequence(
        RouterId("r"), RequestId(f"q{order}"), Attempt(1), token_ids, num_tokens, params, "", order, now
    )


def scheduler(blocks: BlockManager, budget: int = 16) -> PrefillScheduler:
    return PrefillScheduler(PrefillSchedulerConfig(budget, ORDER), blocks)


def finish(scheduler: PrefillScheduler, plan: StepPlan) -> list[tuple[str, bool]]:
    outputs = tuple(None if row.sample is None else TokenOutput(1) for row in plan.rows)
    return [(s.request, t is not None) for s, t in scheduler.account(StepOutput(outputs, 0.1))]


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    return [] if plan is None else [(row.request, row.start, len(row.token_ids)) for row in plan.rows]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 11, 12, 13])
def test_b055_chunks_cover_the_prompt_whatever_the_boundaries(budget: int, num_tokens: int) -> None:
    blocks = BlockManager(8, 4, "m")
    one = scheduler(blocks, budget)
    sequence = prompt(1, num_tokens)
    one.add(sequence)
    covered = 0
    while (plan := one.plan(0.0)) is not None:
        [(_, start, n)] = shape(plan)
        assert start == covered
        assert n == min(budget, num_tokens - covered)
        covered += n
        assert finish(one, plan) == [("q1", covered == num_tokens)]
        cached = blocks.match(sequence.token_ids, "")
        assert len(cached) == covered // 4  # published as computed
        blocks.release(cached)
    assert covered == num_tokens
    sequence.release(blocks)
    assert blocks.counts().used == 0


def test_several_prompts_share_a_step() -> None:
    one = scheduler(BlockManager(16, 4, "m"))
    for order, n in ((1, 5), (2, 4), (3, 20)):
        one.add(prompt(order, n, first=100 * order))
    plan = one.plan(0.0)
    assert plan is not None
    assert shape(plan) == [("q2", 0, 4), ("q1", 0, 5), ("q3", 0, 7)]
    assert plan.num_tokens == 16


def test_blocks_are_taken_when_the_first_chunk_starts_and_for_the_whole_prompt() -> None:
    blocks = BlockManager(16, 4, "m")
    one = scheduler(blocks, budget=4)
    one.add(prompt(1, 20))
    assert blocks.counts().used == 0
    plan = one.plan(0.0)
    assert plan is not None
    assert blocks.counts().used == 5
    finish(one, plan)
    assert blocks.counts().used == 5


def test_b062_a_prompt_that_does_not_fit_now_is_passed_over() -> None:
    blocks = BlockManager(8, 4, "m")
    held = blocks.allocate(4)
    assert held is not None
    one = scheduler(blocks)
    one.add(prompt(1, 32))  # needs all 8
    for order in range(2, 12):
        small = prompt(order, 3, first=100 * order, now=0.1)
        one.add(small)
        plan = one.plan(1.0)
        assert plan is not None
        assert shape(plan) == [(f"q{order}", 0, 3)]
        finish(one, plan)
        small.release(blocks)
    blocks.release(held)
    plan = one.plan(1.0)
    assert plan is not None
    assert shape(plan) == [("q1", 0, 16)]


def test_b062_a_prompt_blocked_beyond_the_bound_gets_the_next_blocks() -> None:
    blocks = BlockManager(8, 4, "m")
    held = blocks.allocate(4)
    assert held is not None
    one = scheduler(blocks)
    one.add(prompt(1, 32))
    assert one.plan(0.0) is None
    one.add(prompt(2, 3, first=50, now=6.0))
    assert one.plan(6.0) is None  # the bound has passed: the younger one may not take blocks
    blocks.release(held)
    plan = one.plan(6.1)
    assert plan is not None
    assert shape(plan)[0][0] == "q1"


def test_b062_an_endless_tiny_stream_does_not_starve_a_long_prompt() -> None:
    blocks = BlockManager(64, 4, "m")
    one = scheduler(blocks)
    long = prompt(1, 160, first=1000)
    one.add(long)
    now, order, started, complete = 0.0, 1, None, False
    while not complete:
        for _ in range(4):  # arrivals that alone fill every step
            order += 1
            one.add(prompt(order, 4, first=10_000 + 10 * order, now=now))
        plan = one.plan(now)
        assert plan is not None
        if started is None and any(row.request == "q1" for row in plan.rows):
            started = now
        sequences = [s for s, _ in one._step]
        complete = ("q1", True) in finish(one, plan)
        for sequence in sequences:
            if sequence.num_remaining == 0:
                sequence.release(blocks)
        now += 0.05
        assert now < 2.0
    assert started is not None
    assert started <= 160 / 1000 + 0.1


def test_a_failed_step_counts_for_nothing() -> None:
    blocks = BlockManager(8, 4, "m")
    one = scheduler(blocks)
    sequence = prompt(1, 8)
    one.add(sequence)
    assert one.plan(0.0) is not None
    assert one.in_step(sequence)
    assert one.fail_step() == [sequence]
    assert not one.in_step(sequence)
    assert sequence.num_computed == 0
    assert one.plan(0.0) is None
    assert blocks.match(list(range(8)), "") == []
