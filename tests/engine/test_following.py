"""The step that needs no decision: the same rows, each with its own token, and none that has ended."""

from __future__ import annotations

import pytest

from cluster.engine.batch import Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.following import following_plan
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import BROKEN_TOKEN_ID, SamplingParams, TokenOutput

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
