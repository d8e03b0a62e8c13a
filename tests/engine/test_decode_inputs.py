"""What a decode step finds on the device is the plan, as `pack` lays it out, and padding that is nobody's."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import Row, SampleSpec
from cluster.engine.decode_buckets import NextStep, bucket_sizes, find_bucket
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.packed_batch import pack
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams

SIZE = 4  # tokens of a block
LIMIT = 40
SCRATCH = BlockId(999)
CPU = torch.device("cpu")
SAMPLE = SampleSpec(SamplingParams(max_tokens=9), (1,), ())


def row(token_id: int, start: int, blocks: list[BlockId]) -> Row:
    return Row(RequestId("r"), Attempt(1), (token_id,), start, blocks, SAMPLE)


def assert_holds(inputs: DecodeInputs, rows: list[Row], num_rows: int) -> None:
    found, count = inputs.batch(num_rows), len(rows)
    if rows:
        packed = pack(rows, SIZE, LIMIT, CPU)
        for name in ("tokens", "positions", "context_lens", "slot_mapping", "logit_rows"):
            assert torch.equal(getattr(found, name)[:count], getattr(packed, name)), name
            assert getattr(found, name).dtype is getattr(packed, name).dtype
        for index, one in enumerate(rows):
            needed = one.start // SIZE + 1
            assert found.block_tables[index, :needed].tolist() == one.block_ids[:needed]
    assert found.query_starts.tolist() == list(range(num_rows + 1))
    assert found.block_tables.shape == (num_rows, LIMIT // SIZE)
    assert found.tokens[count:].tolist() == found.positions[count:].tolist() == [0] * (num_rows - count)
    assert set(found.context_lens[count:].tolist()) <= {1}
    assert set(found.slot_mapping[count:].tolist()) <= {SCRATCH * SIZE}
    assert set(found.block_tables[count:, 0].tolist()) <= {SCRATCH}


@given(st.integers(0, 2**32), st.sampled_from([3, 20]))
def test_rows_that_come_go_grow_and_change_places(seed: int, most_rows: int) -> None:
    """Few changed rows are copied one by one, many at once."""
    rng, sizes = random.Random(seed), bucket_sizes(most_rows)
    inputs = DecodeInputs(most_rows, LIMIT, SIZE, SCRATCH, CPU)
    assert_holds(inputs, [], most_rows)
    free = iter(range(100_000))
    running: list[tuple[list[BlockId], int]] = []  # blocks, position of the next token
    for _ in range(8):
        running = [one for one in running if rng.random() < 0.9 and one[1] < LIMIT]
        while len(running) < most_rows and rng.random() < 0.7:
            start = rng.randrange(LIMIT)
            running.append(([BlockId(next(free)) for _ in range(start // SIZE + 1)], start))
        if rng.random() < 0.3:
            rng.shuffle(running)
        rows = []
        for blocks, start in running:
            while len(blocks) * SIZE <= start or rng.random() < 0.2:
                blocks.append(BlockId(next(free)))  # more than a sequence can be long, too
            rows.append(row(rng.randrange(1000), start, blocks))
        num_rows = find_bucket(sizes, len(rows)) or sizes[0]
        inputs.write(rows, num_rows)
        assert_holds(inputs, rows, num_rows)
        running = [(blocks, start + 1) for blocks, start in running]
        following = NextStep.after(rows, SIZE, LIMIT) if rows else None
        if following is not None and rng.random() < 0.7:
            tokens = torch.tensor([rng.randrange(1000) for _ in range(num_rows)])
            inputs.write_next(following, tokens, num_rows)
            expected = [
                row(token_id, start, blocks)
                for token_id, (blocks, start) in zip(tokens.tolist(), running, strict=False)
            ]
            assert following.starts == tuple(one.start for one in expected)
            assert_holds(inputs, expected, num_rows)


def test_memory_stays_where_it_is() -> None:
    inputs = DecodeInputs(2, LIMIT, SIZE, SCRATCH, CPU)
    before = inputs.batch(2)
    inputs.write([row(5, 7, [BlockId(3), BlockId(1)])], 2)
    after = inputs.batch(2)
    for name in ("tokens", "positions", "query_starts", "context_lens", "block_tables", "slot_mapping"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr()
    assert before.tokens.tolist() == [5, 0]


@pytest.mark.parametrize("most_rows", [1, 2, 5])
def test_context_lengths_have_room_behind_the_other_numbers(most_rows: int) -> None:
    inputs = DecodeInputs(most_rows, LIMIT, SIZE, SCRATCH, CPU)
    batch = inputs.batch(most_rows)
    for part in (batch.tokens, batch.positions, batch.slot_mapping, batch.context_lens):
        assert (part.data_ptr() - batch.tokens.data_ptr()) % 16 == 0
    rows = [row(index, 4 * index, [BlockId(10 * index + b) for b in range(6)]) for index in range(most_rows)]
    inputs.write(rows, most_rows)
    assert_holds(inputs, rows, most_rows)
