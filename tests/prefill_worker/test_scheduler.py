"""The prefill scheduler: deadlines, blocks taken late, nobody starved by size or class."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.pace import Pace
from cluster.engine.sequence import Sequence, num_blocks_for
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams, TokenOutput
from cluster.slo_classes import Targets
from cluster.step_model import StepModel, StepWork, chunk_attention
from cluster.wire.messages import WorkerLoad
from prefill_worker.scheduler import PrefillScheduler, PrefillSchedulerConfig

TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)
MACHINE = StepModel(2e-3, 8e-3, 1e-3, 0.0, 1e-8)  # a thousand tokens take a second


def prompt(
    order: int,
    num_tokens: int,
    *,
    first: int = 0,
    now: float = 0.0,
    ttft_s: float = TARGETS.ttft_s,
    is_batch: bool = False,
) -> Sequence:
    token_ids = [first + i for i in range(num_tokens)]
    params = SamplingParams(max_tokens=4)
    pace = Pace(TARGETS, now + ttft_s, is_batch=is_batch)
    return Sequence(
        RouterId("r"), RequestId(f"q{order}"), Attempt(1), token_ids, num_tokens, params, "", order, now, pace
    )


def scheduler(blocks: BlockManager, budget: int = 16) -> PrefillScheduler:
    made = PrefillScheduler(PrefillSchedulerConfig(budget, TARGETS), blocks)
    made.pacer.calibrated(MACHINE)
    return made


def finish(scheduler: PrefillScheduler, plan: StepPlan, now: float = 0.0) -> list[tuple[str, bool]]:
    outputs = tuple(None if row.sample is None else TokenOutput(1) for row in plan.rows)
    work = StepWork(
        plan.num_tokens, 0, sum(chunk_attention(row.start, len(row.token_ids)) for row in plan.rows)
    )
    results = scheduler.account(StepOutput(outputs, MACHINE.step_s(work)), now)
    return [(sequence.request, token is not None) for sequence, token in results]


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    return [] if plan is None else [(row.request, row.start, len(row.token_ids)) for row in plan.rows]


class Worker:
    """Runs a scheduler on `MACHINE`; a prompt's blocks go when it is complete."""

    def __init__(self, num_blocks: int = 512, block_size: int = 16, budget: int = 512) -> None:
        self.blocks = BlockManager(num_blocks, block_size, "m")
        self.scheduler = scheduler(self.blocks, budget)
        self.sequences: dict[str, Sequence] = {}
        self.now = 0.0
        self.done: dict[str, float] = {}
        self.longest_s = 0.0
        self.covered: dict[str, int] = {}

    def add(self, num_tokens: int, **how: float) -> str:
        order = len(self.sequences) + 1
        one = prompt(order, num_tokens, first=10_000 * order, now=self.now, **how)  # type: ignore[arg-type]
        self.sequences[one.request] = one
        self.scheduler.add(one)
        return one.request

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        pairs = 0.0
        for row in plan.rows:
            sequence = self.sequences[row.request]
            assert len(row.block_ids) >= num_blocks_for(sequence.num_tokens, self.blocks.block_size)
            assert row.start == self.covered.get(row.request, 0), "a chunk twice, or one left out"
            self.covered[row.request] = row.start + len(row.token_ids)
            pairs += chunk_attention(row.start, len(row.token_ids))
        seconds = MACHINE.step_s(StepWork(plan.num_tokens, 0, pairs))
        self.longest_s = max(self.longest_s, seconds)
        self.now += seconds
        for request, is_complete in finish(self.scheduler, plan, self.now):
            if is_complete:
                self.done[request] = self.now
                self.sequences[request].release(self.blocks)
        self.blocks.check_integrity()
        return True


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


def test_a_cached_head_is_not_computed_again() -> None:
    worker = Worker()
    worker.add(100)
    while worker.step():
        pass
    again = prompt(7, 100, first=10_000)
    worker.scheduler.add(again)
    assert shape(worker.scheduler.plan(worker.now)) == [("q7", 96, 4)]


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


def test_b062_a_prompt_that_has_waited_for_what_it_costs_gets_the_next_blocks() -> None:
    blocks = BlockManager(8, 4, "m")
    held = blocks.allocate(4)
    assert held is not None
    one = scheduler(blocks)
    one.add(prompt(1, 32))  # 32 ms of work: a twentieth of the time has paid for it within a second
    began = []
    for order in range(2, 60):
        now = 2.0 + 0.05 * order
        small = prompt(order, 3, first=100 * order, now=now)
        one.add(small)
        plan = one.plan(now)
        began.append(plan is not None)
        if plan is not None:
            finish(one, plan, now)
            small.release(blocks)
        else:
            one.remove(small)
    assert began[0]
    assert began[-20:] == [False] * 20  # nobody else takes blocks any more
    blocks.release(held)
    assert shape(one.plan(6.0))[0][0] == "q1"


@pytest.mark.parametrize("is_batch", [False, True])
def test_b062_an_endless_stream_of_small_ones_does_not_starve_a_long_prompt(is_batch: bool) -> None:
    worker = Worker()
    long = worker.add(6_000, is_batch=is_batch)  # six seconds of work: never in time
    bound_s = 6.0 / 0.05 * 1.2
    while long not in worker.done:
        assert worker.now < bound_s
        if len(worker.scheduler._waiting) < 4:
            worker.add(150)
        worker.step()
    in_time = [worker.done[name] - worker.sequences[name].accepted_s for name in worker.done if name != long]
    assert max(in_time) < TARGETS.ttft_s


def test_short_prompts_do_not_wait_for_a_long_one_that_can() -> None:
    worker = Worker()
    long = worker.add(1_500)
    worker.step()
    short = worker.add(100)
    while short not in worker.done:
        worker.step()
    assert worker.done[short] < 0.4
    while worker.step():
        pass
    assert worker.done[long] <= TARGETS.ttft_s


def test_deadlines_that_routers_send_decide() -> None:
    worker = Worker()
    easy, tight = worker.add(900, ttft_s=5.0), worker.add(900, ttft_s=1.0)
    while worker.step():
        pass
    assert worker.done[tight] < 1.0 < worker.done[easy]


def test_batch_prompts_soak_up_what_is_left() -> None:
    worker = Worker()
    batch = worker.add(2_000, is_batch=True)
    worker.step()
    first = worker.add(300)
    while first not in worker.done:
        worker.step()
    assert worker.done[first] < 0.1 + 0.45  # the step it met, and its own work
    while worker.step():
        pass
    assert worker.done[batch] < 2.6


def test_a_step_is_as_long_as_its_targets_bear_whatever_the_bound() -> None:
    worker = Worker(budget=4096)
    worker.add(3_000)
    while worker.step():
        pass
    assert 0.8 * 0.1 < worker.longest_s <= 0.1


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.sampled_from([0.01, 0.5, 3.0]), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(26, 60),
    st.integers(1, 300),
)
@settings(max_examples=50)
def test_everybody_is_computed_once_with_blocks_of_its_own(
    prompts: list[tuple[int, float, bool, int]], num_blocks: int, budget: int
) -> None:
    worker = Worker(num_blocks, 16, max(budget, 8))
    for num_tokens, ttft_s, is_batch, pause in prompts:
        worker.add(num_tokens, ttft_s=ttft_s, is_batch=is_batch)
        for _ in range(pause):
            worker.step()
    while worker.step():
        pass
    assert set(worker.done) == set(worker.sequences)
    assert worker.covered == {name: one.num_tokens for name, one in worker.sequences.items()}
    assert worker.blocks.counts().used == 0
    assert worker.scheduler.num_queued_tokens == 0
    assert len(worker.scheduler.pacer.prompts) == 0


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


def test_what_a_router_is_told_of_the_queue() -> None:
    worker = Worker()
    worker.add(500)
    worker.add(400, is_batch=True)
    worker.step()
    load = worker.scheduler.pacer.gauges(WorkerLoad())
    assert load.step_model == MACHINE
    assert load.on_time_prefill_s == pytest.approx(0.5, rel=0.25)
    assert load.late_prefill_s == pytest.approx(0.4, rel=0.01)


def test_the_rate_of_late_prompts_is_what_they_got_while_they_waited() -> None:
    worker = Worker()
    assert worker.scheduler.pacer.late_rate == 0.0
    worker.add(8_000, ttft_s=-1.0)  # takes eight seconds
    for _ in range(60):
        worker.step()
    assert worker.scheduler.pacer.gauges(WorkerLoad()).late_rate == pytest.approx(0.95, abs=0.06)
