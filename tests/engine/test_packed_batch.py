"""A packer that lives on gives the batches that a new one gives, whatever came before."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.batch import Row, SampleSpec
from cluster.engine.drafts import asked_of
from cluster.engine.following import FollowingRows, Run
from cluster.engine.packed_batch import _MOST_SIZES, PackedBatch, Packer, pack
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams

BLOCK, MAX_LEN = 4, 4000
CPU = torch.device("cpu")
SAMPLE = SampleSpec(SamplingParams(max_tokens=1), (), ())


def row(tokens, start, blocks, samples=True, num_drafts=0):
    sample = SAMPLE if samples else None
    return Row(RequestId("r"), Attempt(1), tokens, start, blocks, sample, num_drafts=num_drafts)


def plain(batch: PackedBatch, rows) -> dict[str, list]:
    """Every tensor's values; of the block tables what a row has, and that nothing else is there."""
    result = {field.name: getattr(batch, field.name).tolist() for field in fields(batch)}
    assert not any(getattr(batch, field.name).data_ptr() % 16 for field in fields(batch))
    tables = batch.block_tables
    assert tables.is_contiguous()
    result["block_tables"] = [tables[i, : len(one.block_ids)].tolist() for i, one in enumerate(rows)]
    assert sum(map(sum, result["block_tables"])) == int(tables.sum())
    return result


def expected(rows) -> dict[str, list]:
    """The definition, token by token."""
    tokens = [(one, i) for one in rows for i in range(len(one.token_ids))]
    ends = np.cumsum([len(one.token_ids) for one in rows]).tolist()
    positions = [one.start + i for one, i in tokens]
    return {
        "tokens": [one.token_ids[i] for one, i in tokens],
        "positions": positions,
        "query_starts": [0, *ends],
        "context_lens": [one.start + len(one.token_ids) for one in rows],
        "block_tables": [list(one.block_ids) for one in rows],
        "slot_mapping": [
            one.block_ids[p // BLOCK] * BLOCK + p % BLOCK
            for (one, _), p in zip(tokens, positions, strict=True)
        ],
        "logit_rows": [
            at
            for one, end in zip(rows, ends, strict=True)
            if one.sample is not None
            for at in range(end - 1 - one.num_drafts, end)
        ],
    }


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_any_run_of_steps(seed):
    """Sequences come, grow, leave, swap places and get new lists; batches grow and shrink."""
    rng = random.Random(seed)
    packer = Packer(BLOCK, MAX_LEN, CPU)
    sequences: list[tuple[list[BlockId], int]] = []
    for _ in range(25):
        if rng.random() < 0.2:
            rng.shuffle(sequences)
        sequences = [one for one in sequences if rng.random() < 0.93]
        sequences += [([], 0) for _ in range(rng.choice([0, 0, 1, 1, 25]))] or (
            [] if sequences else [([], 0)]
        )
        rows, after = [], []
        for blocks, start in sequences:
            if rng.random() < 0.05:  # preempted and back with other blocks
                blocks = [BlockId(rng.randrange(1, 999)) for _ in blocks]
            length = 1 if start and rng.random() < 0.8 else rng.randrange(1, 30)
            while len(blocks) * BLOCK < start + length + rng.choice([0, 0, 9]):
                blocks.append(BlockId(rng.randrange(1, 999)))
            tokens = [rng.randrange(2**32) for _ in range(length)]
            samples, num_drafts = rng.random() < 0.9, rng.randrange(length) if rng.random() < 0.2 else 0
            rows.append(row(tokens, start, blocks, samples, num_drafts if samples else 0))
            after.append((blocks, start + length))
        sequences = after
        assert plain(packer.pack(rows), rows) == expected(rows)
        assert packer.next_positions.tolist() == asked_of(rows)[1]
        assert plain(pack(rows, BLOCK, MAX_LEN, CPU), rows) == expected(rows)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_any_run_of_decode_steps(seed):
    """Rows go on by a token each, until one needs a block, stands back, leaves, or is read again."""
    rng = random.Random(seed)
    packer = Packer(BLOCK, 60, CPU)
    sequences = [([BlockId(rng.randrange(1, 99)) for _ in range(20)], rng.randrange(20)) for _ in range(3)]
    for _ in range(40):
        rows = [row([rng.randrange(99)], start, blocks) for blocks, start in sequences]
        step = rng.randrange(16)
        if step == 0:
            rows[rng.randrange(3)] = row([7], sequences[0][1], sequences[0][0], samples=False)
        elif step == 1:
            rows = rows[::-1]
        elif step == 2:
            rows[0] = row([7, 8], sequences[0][1], sequences[0][0])
        elif step == 3:
            with pytest.raises(ValueError, match="brings no tokens"):
                packer.pack([rows[0], row([], 5, [BlockId(1)] * 2), rows[1]])
        elif step == 4:
            sequences[0][0].append(BlockId(rng.randrange(1, 99)))
        elif step == 5:
            rows = rows[1:]
        assert plain(packer.pack(rows), rows) == expected(rows)
        if step != 6:  # else the same positions again
            sequences = [(blocks, (start + 1) % 59) for blocks, start in sequences]


def test_a_smaller_batch_after_a_bigger_one_and_back():
    packer = Packer(BLOCK, MAX_LEN, CPU)
    big = [
        row(list(range(100, 100 + i)), 0, [BlockId(7 * i + j + 1) for j in range(20)]) for i in range(1, 41)
    ]
    small = [row([5], 3, [BlockId(3)])]
    for rows in (big, small, big, small, big[::-1], big[3:9]):
        assert plain(packer.pack(rows), rows) == expected(rows)


def test_tensors_are_the_same_while_sizes_are():
    packer = Packer(BLOCK, MAX_LEN, CPU)
    blocks = [BlockId(4)]
    first = packer.pack([row([5], 0, blocks)])
    assert packer.pack([row([6], 1, blocks)]) is first
    assert (first.tokens.tolist(), first.positions.tolist(), first.slot_mapping.tolist()) == ([6], [1], [17])
    assert packer.pack([row([6, 7], 1, blocks)]) is not first


def test_the_same_rows_go_on_in_place_when_they_are_planned_and_a_run_may_follow():
    packer = Packer(BLOCK, MAX_LEN, CPU)
    lists = [[BlockId(10 * i + j + 1) for j in range(3)] for i in range(3)]
    first, num_on, rows = None, 0, ()
    for step in range(9):
        rows = tuple(row([step], step + i, blocks) for i, blocks in enumerate(lists))
        batch = packer.pack(rows)
        first, num_on = first or batch, num_on + (packer._num_since > 0)
        assert batch is first
        assert plain(batch, rows) == expected(rows)
        assert packer.next_positions.tolist() == [one.start + 1 for one in rows]
        if step == 4:
            lists[1].append(BlockId(77))
    assert num_on > 5  # the others were laid out anew
    run = Run(rows, [SAMPLE] * 3)
    following = FollowingRows(run, 1, [4, 5, 6])
    assert_packed(packer, following, list(following), lists)
    for others in (rows[:2], rows[::-1], (*rows[:2], row([3], 5, list(lists[2])))):  # these are not next
        assert plain(packer.pack(others), others) == expected(others)


def test_tuples_of_blocks_and_one_list_in_two_rows():
    packer = Packer(BLOCK, MAX_LEN, CPU)
    shared = [BlockId(1), BlockId(2)]
    for rows in (
        [row([1], 4, shared), row([2], 4, (BlockId(3), BlockId(4))), row([1], 0, shared)],
        [row([1], 4, shared), row([1], 1, shared)],
    ):
        assert plain(packer.pack(rows), rows) == expected(rows)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row([], 0, [BlockId(1)]), "request r brings no tokens"),
        (row([4] * 5, 0, [BlockId(1)]), "request r has 1 blocks for 5 tokens, needs 2"),
        (row([4], MAX_LEN, [BlockId(1)] * 2000), "request r reaches 4001 tokens of 4000"),
    ],
)
def test_an_impossible_row_is_refused_and_the_next_batch_is_right(bad, message):
    packer = Packer(BLOCK, MAX_LEN, CPU)
    good = [row([1], 5, [BlockId(1), BlockId(2)]), row([1, 2, 3], 0, [BlockId(9)])]
    packer.pack(good)
    with pytest.raises(ValueError, match=message):
        packer.pack([good[1], bad])
    assert plain(packer.pack(good), good) == expected(good)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_any_run_is_counted_on_as_if_each_step_were_packed_anew(seed):
    """Rows begin blocks at different steps; in between come batches of others, steps that are left out, and
    blocks that are appended."""
    rng = random.Random(seed)
    packer = Packer(BLOCK, 70, CPU)
    others = [row([1, 2, 3], 0, [BlockId(9)]), row([4], 3, [BlockId(8)])]
    for _ in range(4):
        starts = [rng.randrange(1, 30) for _ in range(rng.randint(1, 6))]
        lists = [[BlockId(rng.randrange(1, 99)) for _ in range(start // BLOCK + 1 + 6)] for start in starts]
        first = tuple(row([rng.randrange(99)], s, b) for s, b in zip(starts, lists, strict=True))
        packer.pack(first)
        run = Run(first, [SAMPLE] * len(first))
        for num_on in range(1, 24):
            tokens = [rng.randrange(99) for _ in first]
            event = rng.randrange(20)
            if event == 0:
                packer.pack(others)
            elif event == 1:
                lists[0].append(BlockId(rng.randrange(1, 99)))
            elif event == 2:
                continue
            rows = FollowingRows(run, num_on, tokens)
            assert [(one.start, tuple(one.token_ids)) for one in rows] == [
                (start + num_on, (token,)) for start, token in zip(starts, tokens, strict=True)
            ]
            assert_packed(packer, rows, list(rows), lists)


def assert_packed(packer, rows, made, lists):
    """Blocks that were appended since a run began need not be in the table before they are needed."""
    batch = packer.pack(rows)
    found, right = plain_but_tables(batch), expected(made)
    for at, blocks in enumerate(right.pop("block_tables")):
        needed = blocks[: made[at].start // BLOCK + 1]
        assert batch.block_tables[at, : len(needed)].tolist() == needed
    assert found == right
    assert packer.next_positions.tolist() == [one.start + 1 for one in made]
    assert all(one.block_ids is blocks for one, blocks in zip(made, lists, strict=True))


def plain_but_tables(batch):
    return {
        field.name: getattr(batch, field.name).tolist()
        for field in fields(batch)
        if field.name != "block_tables"
    }


@pytest.mark.parametrize("num_blocks", [2, 30])
def test_a_run_without_room_is_refused_like_any_batch(num_blocks):
    packer = Packer(BLOCK, 12, CPU)
    first = (row([5], 6, [BlockId(3)] * num_blocks), row([5], 2, [BlockId(4)] * 30))
    packer.pack(first)
    run = Run(first, [SAMPLE, SAMPLE])
    num_good = 1 if num_blocks == 2 else 5
    for num_on in range(1, num_good + 1):
        packer.pack(FollowingRows(run, num_on, [1, 2]))
    with pytest.raises(ValueError, match="2 blocks for 9 tokens" if num_blocks == 2 else "reaches 13 tokens"):
        packer.pack(FollowingRows(run, num_good + 1, [1, 2]))
    assert plain(packer.pack(first), first) == expected(first)


def test_a_batch_that_fails_is_no_batch_to_go_on_from() -> None:
    packer = Packer(BLOCK, MAX_LEN, CPU)
    one, other = [1, 5], [2, 3, 6]
    packer.pack([row([5], 3, one), row([6], 7, other)])
    with pytest.raises(OverflowError):
        packer.pack([row([2**63], 3, [4])])
    after = [row([7], 4, one), row([8], 8, other)]
    assert plain(packer.pack(after), after) == expected(after)


def test_memory_of_many_sizes_is_given_up() -> None:
    packer = Packer(BLOCK, MAX_LEN, CPU)
    blocks = list(range(128))
    for _ in range(2):
        for count in range(1, 100):
            batch = packer.pack([row(list(range(count)), 0, blocks)])
            assert batch.tokens.tolist() == list(range(count))
            assert len(packer._made) <= _MOST_SIZES
