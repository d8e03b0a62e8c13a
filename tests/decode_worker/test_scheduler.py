"""The decode scheduler: continuous batching, growth, preemption that loses nothing and cannot lock up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import PlainOutputs, StepOutput
from cluster.engine.following import following_plan
from cluster.engine.sequence import num_blocks_for
from cluster.sampling import FinishReason, TokenOutput
from cluster.step_model import StepModel
from decode_worker.room import AHEAD
from tests.support.decode_bench import DecodeBench


def test_every_running_sequence_gets_one_token_a_step_oldest_first() -> None:
    bench = DecodeBench(32)
    for length in (5, 3, 9):
        bench.add([length] * length, 6)
    for _ in range(3):
        new = bench.step()
        assert new is not None
        assert [one.sequence.request for one in new] == ["q1", "q2", "q3"]
    bench.run()


def test_finish_reasons_end_a_sequence_and_leave_its_blocks_as_cache() -> None:
    bench = DecodeBench(8)
    sequence = bench.add([1, 2, 3], 6)
    assert sequence is not None
    reasons = []
    while (new := bench.step()) is not None:
        reasons += [one.finish_reason for one in new]
    assert reasons == [None] * 4 + [FinishReason.LENGTH]
    # Prompt and answer: 8 tokens have KV, the ninth needs none.
    assert len(bench.blocks.match(sequence.token_ids, "")) == 2


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_b117_blocks_used_are_those_of_the_tokens_after_each_step(num_tokens: int) -> None:
    bench = DecodeBench(16)
    sequence = bench.add(list(range(num_tokens)), 12, growth=0)
    assert sequence is not None
    while (new := bench.step()) is not None:
        if new[0].finish_reason is None:
            most = num_blocks_for(min(sequence.num_computed + AHEAD, num_tokens + 11), 4)
            assert num_blocks_for(sequence.num_computed, 4) <= len(sequence.block_ids) <= most
            assert bench.blocks.counts().used == len(sequence.block_ids)


def test_chunks_have_a_bound_whatever_the_time() -> None:
    bench = DecodeBench(64, max_chunk_tokens=3)
    bench.add([1, 2], 4)
    bench.add(list(range(20)), 2, ready=False)
    bench.add(list(range(9)), 2, ready=False)
    while (plan := bench.scheduler.plan(0.0)) is not None:
        step = bench.scheduler.book.step
        assert step is not None
        assert sum(len(row.token_ids) for row in plan.rows[step.num_decode_rows :]) <= 3
        bench.scheduler.account(bench.runner.finish(plan), 0.0)
    assert bench.scheduler.num_sequences == 0


def test_b050_eight_long_streams_in_a_pool_for_one() -> None:
    bench = DecodeBench(10, max_chunk_tokens=4)
    for start in range(8):
        bench.add([start, start + 1, 3], 30, growth=0)
    preempted: Counter[str] = Counter()
    before: set[str] = set()
    while bench.scheduler.num_sequences:
        bench.step()
        now = {sequence.request for sequence in bench.scheduler._preempted}
        preempted.update(now - before)
        before = now
    bench.run()
    assert set(preempted) == {f"q{n}" for n in range(2, 9)}  # all but the oldest
    assert max(preempted.values()) >= 2
    assert bench.scheduler.num_preemptions >= 10


def test_b095_out_of_blocks_for_the_first_step_after_the_transfer() -> None:
    bench = DecodeBench(4)
    bench.add([1] * 4, 8, growth=0)
    bench.add([2] * 4, 6, growth=0)
    held = bench.blocks.allocate(2)
    assert held is not None
    assert bench.step() is not None  # the older one grows: the younger is preempted
    assert bench.scheduler.num_preempted == 1
    bench.blocks.release(held)
    bench.run()


def test_the_oldest_waits_for_blocks_that_leases_hold_and_keeps_its_own() -> None:
    bench = DecodeBench(3)
    bench.add([1] * 4, 6, growth=0)
    held = bench.blocks.allocate(2)
    assert held is not None
    assert bench.step() is None
    assert bench.scheduler.num_preemptions == 0
    bench.blocks.release(held)
    bench.run()


def test_the_youngest_is_preempted_and_the_oldest_of_the_preempted_comes_back_first() -> None:
    bench = DecodeBench(9)
    for value in (1, 2, 3):
        bench.add([value] * 8, 9, growth=0)
    # Each needs a third block, and later a fourth: 3 x 4 do not fit 9.
    order: list[str] = []
    while bench.scheduler.num_sequences:
        bench.step()
        waiting = {s.request for s in bench.scheduler._preempted}
        running = {s.request for s in bench.scheduler.sequences()} - waiting
        assert not waiting or not running or min(waiting) > min(running)
        order += [r for r in ("q1", "q2", "q3") if r not in order and len(bench.tokens[r]) == 9]
    assert order == ["q1", "q2", "q3"]
    assert bench.scheduler.num_preemptions > 0


def test_cancel_frees_at_once_or_after_the_step() -> None:
    bench = DecodeBench(16)
    first, second = bench.add([1] * 5, 9), bench.add([2] * 5, 9)
    assert first is not None
    assert second is not None
    bench.scheduler.cancel(first)
    assert bench.blocks.counts().used == 3
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.scheduler.cancel(second)
    assert bench.scheduler.num_sequences == 0
    assert bench.blocks.counts().used == 4  # the step writes there
    assert bench.scheduler.account(bench.runner.finish(plan), 0.0) == []
    assert bench.blocks.counts().used == 0


def test_a_failed_step_drops_its_sequences_and_publishes_nothing_of_it() -> None:
    bench = DecodeBench(16)
    first, second = bench.add([1] * 7, 9), bench.add([2] * 7, 9)
    assert first is not None
    assert second is not None
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.runner.crash(plan)
    bench.scheduler.cancel(second)
    assert bench.scheduler.fail_step() == [first]
    assert bench.blocks.counts().used == 0
    assert len(bench.blocks.match(first.token_ids, "")) == 1  # not the block whose last slot the step wrote


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(2, 14), st.booleans()), min_size=1, max_size=7),
    st.integers(7, 16),
    st.integers(1, 6),
)
def test_nothing_locks_up_and_all_tokens_are_exact(
    requests: list[tuple[int, int, bool]], num_blocks: int, mixed: int
) -> None:
    bench = DecodeBench(num_blocks, max_chunk_tokens=mixed)
    for length, max_tokens, ready in requests:
        bench.add([length] * length, max_tokens, growth=0, ready=ready)
    bench.run()


def test_rows_that_need_not_be_in_every_step_are_told_apart() -> None:
    bench = DecodeBench(64)
    for start in range(3):
        bench.add([start, 1, 2], 8)
    assert bench.scheduler.yielding() == (0, 0)
    late = bench.scheduler.sequences()[0]
    late.pace.yields = True
    assert bench.scheduler.yielding() == (1, len(late.token_ids))


def test_a_step_may_go_on_while_all_that_is_here_decodes_and_has_a_place() -> None:
    bench = DecodeBench(16)
    scheduler = bench.scheduler
    first, second = bench.add([1] * 5, 9), bench.add([2] * 5, 9)
    assert first is not None
    assert second is not None
    assert not scheduler.may_go_on()  # no step
    second.pace.yields = True
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert not scheduler.may_go_on()  # a row that may have to stand back
    scheduler.account(bench.runner.finish(plan), 0.0)
    second.pace.yields = False
    assert scheduler.plan(0.0) is not None
    assert scheduler.may_go_on()
    third = bench.add([3] * 5, 9, ready=False)
    assert third is not None
    assert not scheduler.may_go_on()  # a prompt waits
    scheduler.cancel(third)
    assert scheduler.may_go_on()
    scheduler.cancel(second)
    assert not scheduler.may_go_on()  # a row nobody wants


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_step_does_not_go_on_past_the_last_block(is_plain: bool) -> None:
    bench = DecodeBench(3)
    sequence = bench.add([1] * 5, 9, growth=0)
    assert sequence is not None
    assert bench.scheduler.plan(0.0) is not None  # the last block is kept for others
    answers = []
    for _ in range(3):
        answers.append((bench.scheduler.decode_context, bench.scheduler.may_go_on()))
        if is_plain:
            assert bench.scheduler.book.unsettled.go_on(StepOutput(PlainOutputs([9]), 0.001), 0.0)
        else:
            bench.scheduler.account(StepOutput((TokenOutput(9),), 0.001), 0.0, went_on=True)
    assert answers == [(6, True), (7, True), (8, False)]
    assert len(sequence.block_ids) == 2


def test_rows_take_the_block_they_need_soon_while_there_are_many() -> None:
    bench = DecodeBench(40)
    first, last = bench.add([1] * 5, 30, growth=0), bench.add([2] * 5, 3, growth=0)
    assert first is not None
    assert last is not None
    bench.step()
    assert [len(first.block_ids), len(last.block_ids)] == [3, 2]  # one at a time; none for a last token
    bench.run()


def test_what_is_cancelled_in_a_step_that_went_on_keeps_its_blocks_until_the_next_one_ends() -> None:
    bench = DecodeBench(16)
    first, second = bench.add([1] * 5, 9), bench.add([2] * 5, 9)
    assert first is not None
    assert second is not None
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    output = bench.runner.finish(plan)
    following = following_plan(plan, output)
    assert following is not None
    bench.runner.begin(following)
    bench.scheduler.cancel(second)  # before its token is booked: it has none
    new = bench.scheduler.account(output, 0.0, went_on=True)
    assert [one.sequence for one in new] == [first]
    assert bench.scheduler.book.busy
    assert bench.blocks.counts().used == 8  # both are written to
    tokens = bench.scheduler.account(StepOutput((TokenOutput(9), TokenOutput(9)), 0.001), 0.0)
    assert [one.sequence for one in tokens] == [first]
    assert bench.blocks.counts().used == 4
    assert second.num_computed == 0
    bench.blocks.check_integrity()


def test_a_failed_step_that_went_on_drops_all_that_was_in_it() -> None:
    bench = DecodeBench(16)
    first, second = bench.add([1] * 5, 9), bench.add([2] * 5, 9)
    assert first is not None
    assert second is not None
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.scheduler.account(bench.runner.finish(plan), 0.0, went_on=True)
    bench.scheduler.cancel(first)
    assert bench.scheduler.fail_step() == [second]
    assert bench.blocks.counts().used == 0


def test_what_steps_took_is_the_same_whenever_somebody_looks() -> None:
    found = []
    for is_watched in (False, True):
        bench = DecodeBench(64, machine=StepModel(0.01, 0.01, 1e-3, 1e-6, 1e-6))
        for length in (5, 3, 9):
            bench.add([length] * length, 40)
        for step in range(36):
            if step == 20:
                bench.add([4] * 12, 6, ready=False)
            assert bench.step() is not None
            if is_watched:
                bench.scheduler.book.settle()
        book = bench.scheduler.book
        meter, steps = book.meter, book.pacer.steps
        found.append(
            (meter.num_steps, meter.decode_step_s, steps.num_observed, steps.model, steps.error, bench.times)
        )
    assert found[0] == found[1]
    assert found[0][0] == 36
