"""Which decode steps go by a prepared shape, and which are the step that was expected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import Row, RowNotes, SampleSpec, StepPlan
from cluster.engine.decode_buckets import MOST_ROWS, NextStep, bucket_sizes, find_bucket, is_decode
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import PromptScore, SamplingParams

SIZE = 4  # tokens of a block
LIMIT = 40  # tokens of a sequence


def row(start: int, num_blocks: int, token_id: int = 7, **changes: Any) -> Row:
    sample = SampleSpec(SamplingParams(max_tokens=9), (1,), ())
    made = Row(RequestId("r"), Attempt(1), [token_id], start, [BlockId(b) for b in range(num_blocks)], sample)
    return msgspec.structs.replace(made, **changes)


@given(st.integers(1, 4096))
def test_sizes_rise_to_the_most_and_waste_little(max_num_seqs: int) -> None:
    sizes = bucket_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, MOST_ROWS)
    for num_rows in range(1, sizes[-1] + 1):
        found = find_bucket(sizes, num_rows)
        assert found is not None
        assert num_rows <= found < 2 * num_rows
        assert found - num_rows < max(16, num_rows / 4)
    assert find_bucket(sizes, sizes[-1] + 1) is None


def test_the_sizes_of_an_ordinary_worker() -> None:
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert bucket_sizes(3) == (1, 2, 3)


def test_only_rows_of_one_token_that_are_due_the_next_are_a_decode_step() -> None:
    good = row(7, 2)
    assert is_decode(StepPlan((good, row(0, 1))), SIZE, LIMIT)
    assert is_decode(StepPlan((row(LIMIT - 1, 10),)), SIZE, LIMIT)
    assert good.sample is not None
    scored = msgspec.structs.replace(good.sample, notes=RowNotes(scores=[PromptScore(-1.0, (), 1)]))
    for bad in (
        row(7, 2, token_ids=[1, 2]),  # a chunk
        row(7, 2, sample=None),  # a chunk of one token that does not end its prompt
        row(7, 2, score=good.sample),  # whose token is scored
        row(7, 2, sample=scored),  # with scores to hand over
        row(7, 2, token_ids=[]),  # nothing to compute
        row(8, 2),  # not covered by its blocks
        row(LIMIT, 11),  # too long
    ):
        assert not is_decode(StepPlan((good, bad)), SIZE, LIMIT)
    assert not is_decode(StepPlan(()), SIZE, LIMIT)


def following(rows: list[Row], token_ids: list[int]) -> list[Row]:
    return [
        msgspec.structs.replace(one, start=one.start + 1, token_ids=[token_id])
        for one, token_id in zip(rows, token_ids, strict=True)
    ]


def test_the_expected_step_is_that_of_the_same_rows_with_the_tokens_they_got() -> None:
    rows = [row(5, 2), row(0, 3)]
    expected = NextStep.after(rows, SIZE, LIMIT)
    assert expected is not None
    after = following(rows, [8, 9])
    assert expected.is_plan(StepPlan(tuple(after)), [8, 9])
    assert isinstance(after[0].block_ids, list)
    after[0].block_ids.append(BlockId(30))  # more room changes nothing
    assert expected.is_plan(StepPlan(tuple(after)), [8, 9])
    others = [
        (after[::-1], [9, 8]),  # moved
        (after[:1], [8]),  # one ended
        ([*after, row(2, 1)], [8, 9, 7]),  # one came
        (following(rows, [8, 1]), [8, 9]),  # another token than the device has
        (following(after, [8, 9]), [8, 9]),  # further on
        ([after[0], msgspec.structs.replace(after[1], sample=row(0, 1).sample)], [8, 9]),  # another request
        ([after[0], msgspec.structs.replace(after[1], token_ids=[9, 9])], [8, 9]),  # a chunk
        ([after[0], msgspec.structs.replace(after[1], score=after[1].sample)], [8, 9]),  # scored
        (
            [after[0], msgspec.structs.replace(after[1], block_ids=list(after[1].block_ids))],
            [8, 9],
        ),  # another list
    ]
    for plan, tokens in others:
        assert not expected.is_plan(StepPlan(tuple(plan)), tokens)
    assert not expected.is_plan(StepPlan(tuple(after), copies=((BlockId(0), BlockId(9)),)), [8, 9])


@pytest.mark.parametrize(("start", "num_blocks"), [(7, 2), (LIMIT - 1, 11)])
def test_nothing_is_expected_without_room_for_another_token(start: int, num_blocks: int) -> None:
    assert NextStep.after([row(5, 2), row(start, num_blocks)], SIZE, LIMIT) is None
    assert NextStep.after([row(5, 2), row(start - 1, num_blocks)], SIZE, LIMIT) is not None
