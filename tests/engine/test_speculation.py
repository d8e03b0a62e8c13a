"""Who drafts, when, and from what history: also when the latest tokens are not told yet."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cluster.engine.batch import Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.draft_policy import MOST_DRAFTS, MOST_ROWS
from cluster.engine.drafts import sort_out
from cluster.engine.following import following_plan
from cluster.engine.speculation import SpeculatingRunner, Speculation
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput

LOOP = [5, 6, 7, 8] * 40
PARAMS = SamplingParams(max_tokens=500)


class LoopRunner:
    """The token after position i is `LOOP[i + 1]`; a step takes 7 ms, and 0.5 ms for each draft."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        self.plans.append(plan)
        if await_history is not None:
            await_history()
        sampled = [
            TokenOutput(LOOP[row.start + len(row.token_ids) - row.num_drafts + index])
            for row in plan.rows
            for index in range(row.num_drafts + 1)
        ]
        outputs, further = sort_out(plan.rows, sampled)
        seconds = 7e-3 + 0.5e-3 * (plan.num_tokens - len(plan.rows))
        return StepOutput(outputs, seconds, further=further)


def row(num_known: int, *, name: str = "a", end: int = 150, params: SamplingParams = PARAMS) -> Row:
    """A request whose prompt is the loop's first 8 tokens, with `num_known` tokens in all."""
    spec = SampleSpec(params, LOOP[:8], LOOP[8:num_known])
    last = (LOOP[num_known - 1],)
    return Row(RequestId(name), Attempt(1), last, num_known - 1, [BlockId(1)], spec, end=end)


def plan_of(*rows: Row, longest_s: float = 1.0) -> StepPlan:
    return StepPlan(rows, longest_s=longest_s)


def test_a_loop_is_drafted_after_one_step_has_shown_what_steps_take() -> None:
    runner = LoopRunner()
    speculating = SpeculatingRunner(runner, Speculation())
    first = speculating.run(plan_of(row(9)))
    assert (first.num_drafted, dict(first.further)) == (0, {})
    second = speculating.run(plan_of(row(10)))
    assert second.num_drafted > 0
    assert [one.token_id for one in second.further[0]] == LOOP[11 : 11 + second.num_drafted]


def test_steps_that_follow_at_once_are_drafted_though_the_loop_has_not_told_their_tokens() -> None:
    runner = LoopRunner()
    speculating = SpeculatingRunner(runner, Speculation())
    speculating.run(plan_of(row(9)))
    one = row(10)
    assert one.sample is not None
    known = one.sample.output_ids
    assert isinstance(known, list)
    plan: StepPlan | None = plan_of(one)
    untold: list[int] = []

    def tell() -> None:
        known.extend(untold)
        untold.clear()

    num_tokens = 10
    while plan is not None and num_tokens < 120:
        output = speculating.run(plan, tell)
        token = output.outputs[0]
        assert token is not None
        untold += [token.token_id, *(more.token_id for more in output.further.get(0, ()))]
        num_tokens += len(untold)
        tokens, plan = list(untold), following_plan(plan, output)
        assert tokens == LOOP[num_tokens - len(tokens) : num_tokens]
    assert num_tokens >= 120
    assert len(runner.plans) < 25
    assert max(len(one.token_ids) for step in runner.plans for one in step.rows) == MOST_DRAFTS + 1


def test_drafts_stop_where_the_blocks_or_the_request_end_and_following_steps_too() -> None:
    runner = LoopRunner()
    speculating = SpeculatingRunner(runner, Speculation())
    speculating.run(plan_of(row(20)))
    output = speculating.run(plan_of(row(20, end=22)))
    assert output.num_drafted == 2
    assert following_plan(plan_of(row(20, end=22)), output) is None  # its blocks are full
    assert following_plan(plan_of(row(20, end=23)), output) is not None
    assert speculating.run(plan_of(row(20, end=20))).num_drafted == 0


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(row(30), longest_s=0.0),
        plan_of(row(30), longest_s=7e-3),  # no time for any
        plan_of(row(30, end=0)),
        plan_of(row(30, params=SamplingParams(max_tokens=500, grammar='{"type": "object"}'))),
        plan_of(*[row(30, name=str(index)) for index in range(MOST_ROWS + 1)]),
    ],
    ids=["not allowed", "no time", "no room", "grammar", "many rows"],
)
def test_who_does_not_draft(plan: StepPlan) -> None:
    speculating = SpeculatingRunner(LoopRunner(), Speculation())
    for _ in range(3):
        assert speculating.run(plan).num_drafted == 0


def test_where_many_decode_a_request_that_repeats_nothing_is_looked_at_less_often() -> None:
    """And has its whole history when it is."""
    speculation = Speculation()
    looping = row(9, end=9)  # no room: only the other one may bring any
    fresh = list(range(100, 130))
    spec = SampleSpec(PARAMS, fresh[:10], answer := [fresh[10]])
    looks = 0
    for step in range(11, 30):
        other = Row(RequestId("b"), Attempt(1), (answer[-1],), step - 1, [BlockId(2)], spec, end=999)
        known = speculation.known_of(other)
        before = None if known is None else known.num_vain
        plan = plan_of(looping, other)
        assert speculation.draft(plan) is plan
        speculation.learn(plan, StepOutput((TokenOutput(1), TokenOutput(fresh[step])), 7e-3))
        known = speculation.known_of(other)
        looks += known is not None and known.num_vain != before
        if known is not None and known.num_vain != before:
            assert known.lookup.tokens == fresh[: step + 1]
        answer.append(fresh[step])
    assert 8 <= looks <= 10  # every other step


def test_what_is_not_repeated_is_not_drafted() -> None:
    speculation = Speculation()
    params = SamplingParams(max_tokens=500)
    spec = SampleSpec(params, list(range(100, 140)), [1])
    plan = plan_of(Row(RequestId("a"), Attempt(1), (1,), 40, [BlockId(1)], spec, end=90))
    speculating = SpeculatingRunner(LoopRunner(), speculation)
    speculating.run(plan)
    assert speculation.draft(plan) is plan


def test_a_wait_for_the_loop_is_no_time_that_a_draft_costs() -> None:
    """What the engine's thread waits for is in the time that runners measure."""
    now = 0.0

    class Waiting(LoopRunner):
        def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
            output = super().run(plan, await_history)
            return msgspec.structs.replace(output, compute_s=output.compute_s + 0.05)

    def wait() -> None:
        nonlocal now
        now += 0.05

    speculation = Speculation()
    speculating = SpeculatingRunner(Waiting(), speculation, clock=lambda: now)
    output = speculating.run(plan_of(row(9)), wait)
    assert output.compute_s == pytest.approx(7e-3 + 0.05)  # the engine's thread subtracts it itself
    known = speculation._costs.of(1)
    assert known is not None
    assert known[0] == pytest.approx(7e-3)


def test_requests_that_ended_are_forgotten() -> None:
    speculation = Speculation()
    speculating = SpeculatingRunner(LoopRunner(), speculation)
    for number in range(100):
        speculating.run(plan_of(row(9 + number % 2, name=f"r{number}")))
    assert speculation.known_of(row(9, name="r99")) is not None
    assert sum(speculation.known_of(row(9, name=f"r{number}")) is not None for number in range(100)) <= 32


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    speculation = Speculation()
    prompt = [*range(10_000, 13_000), 5, 6, 7, 8, 5, 6, 7]
    spec = SampleSpec(PARAMS, prompt, [8])
    one = Row(RequestId("a"), Attempt(1), (8,), len(prompt), [BlockId(1)], spec, end=len(prompt) + 50)
    plan = plan_of(one)
    speculation.learn(plan, StepOutput((TokenOutput(5),), 7e-3))
    assert speculation.draft(plan) is plan  # 2,048 of 3,008 tokens
    drafted = speculation.draft(plan)
    assert drafted.rows[0].token_ids[:4] == (8, 5, 6, 7)
