"""A sequence's books: reservation, rows, outputs, publication."""

from __future__ import annotations

import pytest

from cluster.engine.sequence import Sequence
from cluster.errors import InvalidRequest
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import FinishReason, SamplingParams


def sequence(
    token_ids: list[int],
    *,
    num_prompt_tokens: int | None = None,
    params: SamplingParams | None = None,
    order: int = 1,
    now: float = 0.0,
) -> Sequence:
    return Sequence(
        RouterId("r"),
        RequestId(f"q{order}"),
        Attempt(1),
        token_ids,
        len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        params or SamplingParams(max_tokens=10),
        "",
        order,
        now,
    )


class TestSequence:
    def test_outputs_start_after_the_clients_prompt(self) -> None:
        resumed = sequence([1, 2, 3, 40, 50], num_prompt_tokens=3, params=SamplingParams(max_tokens=3))
        assert resumed.output_ids == [40, 50]
        assert resumed.sample.prompt_ids == [1, 2, 3]
        assert resumed.num_generated == 0
        assert resumed.append(60) is FinishReason.LENGTH  # the third output, although the attempt's first
        assert resumed.num_generated == 1
        assert resumed.sample.output_ids == [40, 50, 60]

    @pytest.mark.parametrize(
        ("token_ids", "num_prompt"), [([], 0), ([1], 0), ([1], 2), ([-1], 1), ([2**32], 1)]
    )
    def test_refuses_nonsense(self, token_ids: list[int], num_prompt: int) -> None:
        with pytest.raises(InvalidRequest):
            sequence(token_ids, num_prompt_tokens=num_prompt)

    def test_rows_sample_only_at_the_end(self) -> None:
        blocks = BlockManager(4, 4, "m")
        one = sequence(list(range(10)))
        assert one.reserve(blocks, 3)
        row = one.row(4)
        assert (list(row.token_ids), row.start, row.sample) == ([0, 1, 2, 3], 0, None)
        one.advance(4)
        row = one.row(6)
        assert (list(row.token_ids), row.start) == ([4, 5, 6, 7, 8, 9], 4)
        assert row.sample is one.sample
        one.advance(6)
        one.append(77)
        row = one.row(1)
        assert (list(row.token_ids), row.start) == ([77], 10)
        assert row.block_ids is one.block_ids

    @pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 9])
    def test_b054_a_full_hit_leaves_one_token_to_compute(self, num_tokens: int) -> None:
        blocks = BlockManager(8, 4, "m")
        first = sequence(list(range(num_tokens)))
        assert first.reserve(blocks, 3)
        first.advance(num_tokens)
        first.publish(blocks)
        first.release(blocks)
        again = sequence(list(range(num_tokens)), order=2)
        assert again.reserve(blocks, 3)
        assert again.num_computed == (num_tokens - 1) // 4 * 4
        assert again.num_remaining >= 1
        whole = sequence(list(range(num_tokens)), order=3)
        assert whole.reserve(blocks, 3, leave_last=False)
        assert whole.num_computed == num_tokens // 4 * 4
        again.release(blocks)
        whole.release(blocks)
        assert blocks.counts().used == 0
        blocks.check_integrity()

    def test_a_failed_reserve_changes_nothing(self) -> None:
        blocks = BlockManager(3, 4, "m")
        held = blocks.allocate(1)
        assert held is not None
        one = sequence(list(range(12)))
        assert not one.reserve(blocks, 3)
        assert not one.reserve(blocks, 2, keep_free=1)
        assert blocks.counts().used == 1
        assert one.reserve(blocks, 2, keep_free=0)
        one.release(blocks)
        blocks.release(held)
        assert blocks.counts().free == 3

    def test_only_computed_full_blocks_are_published(self) -> None:
        blocks = BlockManager(4, 4, "m")
        one = sequence(list(range(12)))
        assert one.reserve(blocks, 3)
        one.advance(7)
        one.publish(blocks)
        one.release(blocks)
        assert len(blocks.match(list(range(12)), "")) == 1


def test_a_token_of_a_step_that_decodes_is_advance_and_append() -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(9,), min_tokens=2)
    for tokens in ([5, 6, 7], [5, 9], [9, 9], [5, 6, 9]):
        one, other = (sequence([1, 2, 3], params=params) for _ in range(2))
        for each in (one, other):
            each.num_computed = 3
            each.append(4)
            each.pace.first_token(0.0)
        for now, token_id in enumerate(tokens, 1):
            assert one.decode_row() == other.row(1)
            other.advance(1)
            other.pace.token(float(now))
            assert one.take(token_id, float(now)) == other.append(token_id)
            assert (one.token_ids, one.output_ids) == (other.token_ids, other.output_ids)
            assert (one.num_computed, one.pace.last_s) == (other.num_computed, other.pace.last_s)
