"""The step that needs no decision: the same rows, each with its own token, and none that has ended."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.batch import PlainOutputs, Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.following import FollowingRows, following_plan
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import BROKEN_TOKEN_ID, SamplingParams, TokenOutput, finish_reason

PARAMS = SamplingParams(max_tokens=4, eos_token_ids=(2,), stop_token_ids=(7,))
BLOCKS = [BlockId(5), BlockId(3)]


def row(name: str, tokens: list[int], start: int, outputs: list[int], params: SamplingParams = PARAMS) -> Row:
    spec = SampleSpec(params, [1, 1], outputs)
    return Row(RequestId(name), Attempt(1), tokens, start, BLOCKS, spec)


def test_every_row_goes_on_with_its_own_token_behind_what_it_brought() -> None:
    plan = StepPlan((row("a", [9], 2, [9]), row("b", [1, 1, 8], 0, [8])))
    following = following_plan(plan, StepOutput((TokenOutput(20), TokenOutput(30)), 0.0))
    assert following is not None
    assert [tuple(one.token_ids) for one in following.rows] == [(20,), (30,)]
    assert [one.start for one in following.rows] == [3, 3]
    for old, new in zip(plan.rows, following.rows, strict=True):
        assert (new.request, new.attempt, new.score) == (old.request, old.attempt, None)
        assert new.block_ids is old.block_ids  # the very list: it may have grown since
        assert new.sample is old.sample


@pytest.mark.parametrize(
    ("token", "num_outputs", "goes_on"),
    [(20, 1, True), (2, 1, False), (7, 1, False), (BROKEN_TOKEN_ID, 1, False), (20, 2, True), (20, 3, False)],
)
def test_a_row_that_ends_ends_the_run(token: int, num_outputs: int, goes_on: bool) -> None:
    plan = StepPlan((row("a", [9], 4, [9] * num_outputs), row("b", [9], 2, [9])))
    following = following_plan(plan, StepOutput((TokenOutput(token), TokenOutput(30)), 0.0))
    assert (following is not None) is goes_on


def test_a_stop_token_before_min_tokens_ends_nothing() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, eos_token_ids=(2,))
    for num_outputs, goes_on in ((1, True), (2, False)):
        plan = StepPlan((row("a", [9], 2, [9] * num_outputs, params),))
        assert (following_plan(plan, StepOutput((TokenOutput(2),), 0.0)) is not None) is goes_on


def test_a_row_without_a_token_has_nothing_to_go_on_with() -> None:
    chunk = Row(RequestId("c"), Attempt(1), [1, 2], 0, BLOCKS, None)
    plan = StepPlan((row("a", [9], 2, [9]), chunk))
    assert following_plan(plan, StepOutput((TokenOutput(20), None), 0.0)) is None


def step(plan: StepPlan, tokens: list[int], *, is_plain: bool) -> StepPlan | None:
    """The plan that follows; histories take the tokens when that is made, as a worker's do."""
    outputs = PlainOutputs(tokens) if is_plain else tuple(map(TokenOutput, tokens))
    following = following_plan(plan, StepOutput(outputs, 0.0))
    for one, token in zip(plan.rows, tokens, strict=True):
        assert one.sample is not None
        assert isinstance(one.sample.output_ids, list)
        one.sample.output_ids.append(token)
    return following


@settings(max_examples=100)
@given(data=st.data())
def test_a_run_is_what_rows_made_one_by_one_are_and_ends_with_its_first_row(
    data: st.DataObject,
) -> None:
    """Whoever makes the plan anew in each step gets the same rows, and ends in the same step."""
    plans = []
    num_rows = data.draw(st.integers(1, 4))
    params = [
        SamplingParams(
            max_tokens=data.draw(st.integers(2, 12)),
            min_tokens=data.draw(st.integers(0, 9)),
            eos_token_ids=tuple(data.draw(st.lists(st.integers(0, 5), max_size=2))),
            stop_token_ids=tuple(data.draw(st.lists(st.integers(0, 5), max_size=1))),
        )
        for _ in range(num_rows)
    ]
    for _ in range(2):
        rows = [row(f"r{index}", [9], 2 + index, [9], params[index]) for index in range(num_rows)]
        plans.append(StepPlan(tuple(rows), longest_s=0.5))
    run, anew = plans
    for _ in range(14):
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows))
        after = step(run, tokens, is_plain=data.draw(st.booleans()))
        after_anew = step(anew, tokens, is_plain=False)
        assert (after is None) is (after_anew is None)
        if after is None or after_anew is None:
            assert any(
                finish_reason(one.sample.params, one.sample.output_ids) for one in anew.rows if one.sample
            )
            return
        assert (after.longest_s, after.num_tokens, len(after.rows)) == (0.5, num_rows, num_rows)
        made = tuple(after_anew.rows)
        for one, other in zip(after.rows, made, strict=True):
            assert (one.request, one.token_ids, one.start, one.end) == (
                other.request,
                other.token_ids,
                other.start,
                other.end,
            )
        run, anew = after, StepPlan(made, longest_s=0.5)
        assert isinstance(run.rows, FollowingRows)
    raise AssertionError("no row has ended")


def test_drafts_that_were_right_end_a_run_and_the_rows_after_them_begin_another() -> None:
    params = SamplingParams(max_tokens=20)
    first = StepPlan((row("a", [9], 2, [9], params), row("b", [9], 4, [9], params)))
    first = StepPlan(tuple(msgspec.structs.replace(one, end=9) for one in first.rows))
    run = step(first, [1, 2], is_plain=True)
    assert run is not None
    further = {1: (TokenOutput(5), TokenOutput(6))}
    after = following_plan(run, StepOutput(PlainOutputs([3, 4]), 0.0, further=further))
    assert after is not None
    assert [(one.start, tuple(one.token_ids)) for one in after.rows] == [(4, (3,)), (8, (6,))]
    again = following_plan(after, StepOutput(PlainOutputs([7, 8]), 0.0))
    assert again is not None
    assert [(one.start, tuple(one.token_ids)) for one in again.rows] == [(5, (7,)), (9, (8,))]
    assert following_plan(first, StepOutput(PlainOutputs([3, 4]), 0.0, further={0: further[1] * 3})) is None
