"""A sequence's books: reservation, rows, outputs, publication; and the order prompts share a step in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.prefill_order import PrefillOrder
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


class TestPrefillOrder:
    ORDER = PrefillOrder(tokens_per_s=100.0, aging_bound_s=5.0, short_share=0.25)

    def compose(self, waiting: list[Sequence], budget: int) -> list[tuple[int, int]]:
        return [(s.order, n) for s, n in self.ORDER.compose(waiting, budget, lambda _: True)]

    def test_short_overtakes_long(self) -> None:
        long, short = sequence([1] * 300, order=1), sequence([1] * 20, order=2, now=1.0)
        assert self.compose([long, short], 100) == [(2, 20), (1, 80)]

    def test_b062_short_passes_while_an_aged_long_one_fills_steps(self) -> None:
        long, short = sequence([1] * 900, order=1), sequence([1] * 20, order=2, now=20.0)
        assert self.compose([long, short], 100) == [(1, 80), (2, 20)]

    def test_b062_a_long_prompt_is_not_overtaken_after_its_deadline(self) -> None:
        long = sequence([1] * 900, order=1)
        tiny = [sequence([1] * 20, order=2 + n, now=5.0 + n) for n in range(50)]
        head = self.compose([*tiny, long], 100)[0]
        assert head == (1, 75)

    @given(
        st.lists(st.tuples(st.integers(1, 400), st.floats(0, 20)), min_size=1, max_size=12),
        st.integers(1, 300),
        st.sets(st.integers(0, 11)),
    )
    def test_composition_is_sound(
        self, prompts: list[tuple[int, float]], budget: int, refused: set[int]
    ) -> None:
        waiting = [sequence([1] * n, order=i, now=t) for i, (n, t) in enumerate(prompts)]
        step = self.ORDER.compose(waiting, budget, lambda s: s.order not in refused)
        allowed = [s for s in waiting if s.order not in refused]
        assert all(0 < n <= s.num_remaining for s, n in step)
        assert len({s.order for s, _ in step}) == len(step)
        assert not {s.order for s, _ in step} & refused
        # Nothing is left of the budget while somebody could use it.
        total = sum(n for _, n in step)
        assert total == min(budget, sum(s.num_remaining for s in allowed))
        if step:
            head = min(allowed, key=lambda s: (self.ORDER.deadline(s), s.order))
            assert step[0][0] is head
            assert step[0][1] >= min(head.num_remaining, budget - budget // 4)
