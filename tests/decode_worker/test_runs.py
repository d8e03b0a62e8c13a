"""Steps that go on by themselves against the same steps planned one by one: nobody can tell them apart."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.batch import PlainOutputs, StepOutput, StepPlan
from cluster.engine.following import FollowingRows, following_plan
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams, TokenOutput
from cluster.wire.messages import LARGEST_RUN_BYTES, Abort, FirstToken, NextTokens, TokenRow, Tokens
from cluster.worker_io import Action, FromRouter, StepDone, StepFailed, ToRouter
from decode_worker.core import DecodeConfig, DecodeCore
from tests.support.scripted_model import EOS, Oracle, ScriptedRunner, TagPool
from tests.support.worker_messages import plan_of, reserve

ROUTERS = [RouterId("a"), RouterId("b")]


@dataclass
class Told:
    """What routers have heard of a request."""

    outputs: list[TokenOutput] = field(default_factory=list)
    reason: object = None


class Worker:
    """A decode core and its engine. `goes_on`: as it has leave to, or never."""

    def __init__(self, goes_on: bool, num_blocks: int, block_size: int, speculates: bool = False) -> None:
        self.goes_on = goes_on
        self.blocks = BlockManager(num_blocks, block_size, "m")
        self.core = DecodeCore(DecodeConfig(block_bytes=1, speculates=speculates), self.blocks)
        self.oracles: dict[RequestId, Oracle] = {}
        self.runner = ScriptedRunner(TagPool(num_blocks, block_size), self.oracles)
        self.told: dict[RequestId, Told] = {}
        self.router: dict[RequestId, RouterId] = {}
        self.left: set[RequestId] = set()
        self.plan: StepPlan | None = None
        self.kinds: list[type] = []  # of messages about steps
        self.num_on = 0
        self.now = 0.0

    def come(self, request: str, prompt: list[int], params: SamplingParams, router: RouterId) -> None:
        name = RequestId(request)
        self.oracles[name] = Oracle(tuple(prompt), params)
        self.told[name], self.router[name] = Told(), router
        event = reserve(prompt, request=request, local=True, params=params, router=router)
        self._do(self.core.handle(event, self.now))

    def leave(self, request: RequestId) -> None:
        event = FromRouter(
            self.router[request], Abort(request=request, attempt=Attempt(1), reason="the client left")
        )
        self._do(self.core.handle(event, self.now))
        self.left.add(request)

    def step(self, between: RequestId | None = None, fails: bool = False) -> None:
        """The end of the step in flight. `between`: who leaves after the next one has begun, or at once."""
        plan = self.plan
        assert plan is not None
        self.now += 0.01
        if fails:
            self.runner.crash(plan)
            self._do(self.core.handle(StepFailed("x"), self.now), ended=True)
            return
        output = self.runner.finish(plan)
        following = following_plan(plan, output) if self.goes_on and self.core.may_go_on() else None
        if following is not None:
            self.num_on += isinstance(following.rows, FollowingRows)
            self.plan = following
            self.runner.begin(following)
        if between is not None and following is not None:
            self.leave(between)
        self._do(self.core.handle(StepDone(output, following is not None), self.now), ended=following is None)
        if between is not None and following is None:
            self.leave(between)

    def _do(self, actions: list[Action], *, ended: bool = False) -> None:
        if ended:
            self.plan = None
        if plan := plan_of(actions):
            assert self.plan is None
            self.plan = plan
            self.runner.begin(plan)
        for action in actions:
            if isinstance(action, ToRouter):
                self._hear(action)
        self.blocks.check_integrity()

    def _hear(self, action: ToRouter) -> None:
        message = action.message
        rows: list[TokenRow] = []
        if isinstance(message, FirstToken):
            rows = [TokenRow(message.request, message.attempt, 0, [message.output], message.finish_reason)]
        elif isinstance(message, Tokens | NextTokens):
            self.kinds.append(type(message))
            rows = message.rows
        for row in rows:
            told = self.told[row.request]
            assert self.router[row.request] == action.router
            assert row.request not in self.left
            assert (row.attempt, row.index, told.reason) == (1, len(told.outputs), None)
            told.outputs += row.outputs
            told.reason = row.finish_reason


def some_params(rng: random.Random, seed: int) -> SamplingParams:
    most = rng.randint(1, 40)
    ends = tuple(rng.sample(range(50), rng.choice([0, 0, 1, 4])))
    return SamplingParams(
        max_tokens=most,
        seed=4 * seed + rng.choice([0, 1, 1, 1, 1, 1, 1, 1]),
        eos_token_ids=(EOS,) if rng.random() < 0.5 else (),
        stop_token_ids=ends,
        min_tokens=rng.choice([0, 0, most // 2]),
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_same_tokens_in_the_same_order_whoever_comes_leaves_or_fails(seed: int) -> None:
    """Requests leave in the same places of their answers or earlier: a step that went on is told later."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([(4, 60), (4, 24), (8, 40)])
    workers = [Worker(goes_on, num_blocks, block_size) for goes_on in (True, False)]
    names = [f"r{index}" for index in range(rng.randint(1, 7))]
    prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 9))] for _ in names]
    params = [some_params(rng, index) for index in range(len(names))]
    arrivals = sorted(rng.choice([0, 0, 0, rng.randrange(30)]) for _ in names)
    leaving = {rng.randrange(40): RequestId(rng.choice(names)) for _ in range(rng.choice([0, 0, 1, 3]))}
    fails_at = rng.choice([None, None, rng.randrange(1, 50)])
    gone = set(leaving.values())
    for worker in workers:
        for at in range(400):
            for index, name in enumerate(names):
                if arrivals[index] == at:
                    worker.come(name, prompts[index], params[index], ROUTERS[index % 2])
            if worker.plan is not None:
                worker.step(leaving.get(at), at == fails_at)
        assert worker.core.quiet()
    on, planned = workers
    assert planned.num_on == 0
    assert NextTokens not in planned.kinds
    for name in map(RequestId, names):
        told, as_planned, oracle = on.told[name], planned.told[name], on.oracles[name]
        for one in (told, as_planned):
            assert one.outputs == oracle.outputs[: len(one.outputs)]
        if name not in gone and fails_at is None:
            assert (told.outputs, told.reason) == (as_planned.outputs, as_planned.reason)


@pytest.mark.parametrize("asks", [False, True])
def test_a_run_of_steps_is_told_in_columns_and_leaves_what_planned_steps_leave(asks: bool) -> None:
    """Whether or not somebody asks for the load in each step."""
    on, planned = Worker(True, 99, 4), Worker(False, 99, 4)
    for worker in (on, planned):
        for index in range(5):
            params = SamplingParams(max_tokens=30 + index, seed=1 + 4 * index)
            worker.come(f"r{index}", [index] * (3 + index), params, ROUTERS[index // 3])
        for _ in range(20):
            worker.step()
            step = worker.core._scheduler.book.step
            assert step is not None
            if asks:
                assert step.context == worker.core.load().decode_context
    assert on.num_on > 12
    assert on.kinds.count(NextTokens) > 24
    if on.plan is not None and isinstance(on.plan.rows, FollowingRows):
        assert len(on.plan.rows) == 5
    for one, other in zip(on.core._scheduler.sequences(), planned.core._scheduler.sequences(), strict=True):
        assert (one.key, one.token_ids, one.output_ids) == (other.key, other.token_ids, other.output_ids)
        assert one.num_computed == other.num_computed
        assert on.told[one.request].outputs == planned.told[one.request].outputs
    assert on.core.load().decode_context == planned.core.load().decode_context


def test_histories_that_nobody_looks_at_wait_until_somebody_does() -> None:
    worker = Worker(True, 99, 4)
    for index in range(4):
        params = SamplingParams(max_tokens=60, seed=1 + 4 * index, min_tokens=index % 2)
        worker.come(f"r{index}", [index], params, ROUTERS[index // 2])
    scheduler = worker.core._scheduler
    most_lacking = 0
    for _ in range(30):
        worker.step()
        step = scheduler.book.unsettled
        assert step is not None
        for sequence, _ in step.rows:
            num_lacking = len(worker.told[sequence.request].outputs) - len(sequence.output_ids)
            assert num_lacking == (0 if sequence.looks_back else len(step.behind))
            most_lacking = max(most_lacking, num_lacking)
    assert most_lacking > 3
    for sequence in scheduler.sequences():
        outputs = worker.told[sequence.request].outputs
        assert sequence.output_ids == [output.token_id for output in outputs]
        assert sequence.token_ids[1:] == sequence.output_ids


def test_histories_that_drafts_come_of_do_not_wait() -> None:
    worker = Worker(True, 99, 4, speculates=True)
    for index in range(3):
        worker.come(f"r{index}", [index], SamplingParams(max_tokens=60, seed=1 + 4 * index), ROUTERS[0])
    most_behind = 0
    for _ in range(30):
        worker.step()
        step = worker.core._scheduler.book.unsettled
        assert step is not None
        most_behind = max(most_behind, len(step.behind))
        for sequence, _ in step.rows:
            outputs = worker.told[sequence.request].outputs
            assert sequence.output_ids == [output.token_id for output in outputs]
    assert most_behind > 3


def test_what_steps_took_is_told_alike_whether_it_was_booked_at_once_or_together() -> None:
    """The step model and the gauges, after more steps than one fit of the model."""
    asked, left = Worker(True, 999, 4), Worker(True, 999, 4)
    for worker in (asked, left):
        for index in range(3):
            worker.come(f"r{index}", [index], SamplingParams(max_tokens=90, seed=1 + 4 * index), ROUTERS[0])
    for _ in range(80):
        for worker in (asked, left):
            worker.step()
        asked.core.load()
    assert left.num_on > 60
    load = left.core.load()
    assert load == asked.core.load()
    assert load.steps == 80
    assert load.step_model is not None


def test_log_probabilities_are_told_row_by_row() -> None:
    worker = Worker(True, 99, 4)
    for index, seed in enumerate((4, 5)):
        worker.come(f"r{index}", [1, 2], SamplingParams(max_tokens=20, seed=seed), ROUTERS[0])
    while worker.plan is not None:
        worker.step()
    assert worker.num_on > 5
    assert NextTokens not in worker.kinds
    for name, told in worker.told.items():
        assert told.outputs == worker.oracles[name].outputs


def test_requests_whose_names_are_too_long_for_a_run_are_told_row_by_row() -> None:
    worker = Worker(True, 99, 4)
    name = "q" * LARGEST_RUN_BYTES
    worker.come(name, [1, 2], SamplingParams(max_tokens=20, seed=1), ROUTERS[0])
    while worker.plan is not None:
        worker.step()
    assert worker.num_on > 5
    assert NextTokens not in worker.kinds
    assert worker.told[RequestId(name)].outputs == worker.oracles[RequestId(name)].outputs


@pytest.mark.parametrize("num_more", [0, 1, 5])
def test_a_request_that_leaves_or_a_step_that_fails_in_a_run_frees_what_it_held(num_more: int) -> None:
    worker = Worker(True, 99, 4)
    for index in range(3):
        worker.come(f"r{index}", [index + 1], SamplingParams(max_tokens=60, seed=1 + 4 * index), ROUTERS[0])
    while NextTokens not in worker.kinds:
        worker.step()
    for _ in range(num_more):
        worker.step()
    worker.step(RequestId("r1"))
    assert worker.blocks.counts().used > 0
    before = len(worker.told[RequestId("r1")].outputs)
    worker.step(fails=True)
    assert len(worker.told[RequestId("r1")].outputs) == before
    assert worker.core.quiet()


def test_a_step_that_nothing_was_said_of_but_tokens_is_not_mistaken_for_one_with_more() -> None:
    worker = Worker(True, 99, 4)
    worker.come("r0", [1], SamplingParams(max_tokens=60, seed=1), ROUTERS[0])
    for _ in range(3):
        worker.step()
    scheduler = worker.core._scheduler
    assert scheduler.book.unsettled.go_on(StepOutput((TokenOutput(3, -0.5),), 0.01), 1.0) is None
    drafted = StepOutput(PlainOutputs([3]), 0.01, further={0: (TokenOutput(4),)}, num_drafted=1)
    assert scheduler.book.unsettled.go_on(drafted, 1.0) is None
    indices = []
    for output in (StepOutput(PlainOutputs([9]), 0.01), drafted, StepOutput(PlainOutputs([9]), 0.01)):
        (sequence,) = scheduler.sequences()
        indices.append(sequence.num_generated)
        told = scheduler.book.unsettled.go_on(output, 1.0)
        if told is None:
            scheduler.account(output, 1.0, went_on=True)
        else:
            (action,) = told
            assert isinstance(action, ToRouter)
            assert isinstance(action.message, NextTokens)
            indices.append(action.message.rows[0].index)
    assert indices == [3, 3, 4, 6, 6]
