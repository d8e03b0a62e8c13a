"""Staged edges whose blocks a kernel gathers and scatters: the conformance suite's promises, in Triton's
interpreter or on a GPU. Which edges use it, and when it pays, is decided without either."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.errors import EdgeError
from cluster.kv.block_copy import BlockRegion, Cut, gather_blocks, scatter_blocks
from cluster.kv.edge import EdgeConfig
from cluster.kv.edges import EdgeKind
from cluster.kv.layout import KVLayout, LayoutEdge, intersect, split
from tests.kernels.triton_support import require
from tests.kv.edge_harness import GEOMETRY, EdgePair, EdgePairs
from tests.kv.stand_ins import use_one_way

block_mover = require("cluster.engine.block_mover")
launch = require("kernels.triton.launch")
SMALL = msgspec.structs.replace(GEOMETRY, num_blocks=12)


class Counting(block_mover.BlockMover):  # type: ignore[misc, name-defined]
    """Takes everything, and counts."""

    def __init__(self) -> None:
        super().__init__(always=True)
        self.num_taken = 0

    def _move(self, work: object) -> bool:
        self.num_taken += 1
        return bool(super()._move(work))


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Counting:
    use_one_way(monkeypatch.setattr)
    found = Counting()
    monkeypatch.setattr(EdgePair, "mover", found)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("num_blocks", [1, 5, 9])  # slots hold 4: part of one, two, three
async def test_bytes_arrive_exactly_and_nothing_else_changes(
    edge_pairs: EdgePairs, mover: Counting, num_blocks: int, dtype: str
) -> None:
    geometry = msgspec.structs.replace(SMALL, dtype=dtype)
    block_bytes = KVLayout.from_geometry(geometry).bytes_per_block
    pair = await edge_pairs(EdgeKind.GLOO, geometry, EdgeConfig(slot_bytes=4 * block_bytes, num_slots=3))
    sources = random.Random(1).sample(range(12), num_blocks)
    targets = random.Random(2).sample(range(12), num_blocks)
    assert await pair.transfer(sources, targets) == num_blocks * block_bytes
    assert torch.equal(pair.bits(pair.target, targets), pair.bits(pair.source, sources))
    assert not pair.bits(pair.target, [block for block in range(12) if block not in targets]).any()
    assert mover.num_taken == 2 * -(-num_blocks // 4)  # a part is one launch on either side


async def test_many_pieces_through_the_same_slots(edge_pairs: EdgePairs, mover: Counting) -> None:
    pair = await edge_pairs(EdgeKind.GLOO, SMALL)
    for step in range(6):
        sources = random.Random(step).sample(range(12), 1 + step)
        await pair.transfer(sources, sources[::-1])
        assert torch.equal(pair.bits(pair.target, sources[::-1]), pair.bits(pair.source, sources))
    assert mover.num_taken >= 12


async def test_blocks_outside_the_pool_are_refused_and_nothing_is_written(
    edge_pairs: EdgePairs, mover: Counting
) -> None:
    pair = await edge_pairs(EdgeKind.GLOO, SMALL)
    with pytest.raises(EdgeError, match="no such KV block: 12"):
        await pair.transfer([0, 1], [2, 12])
    assert not pair.target.tensor.any()


def region(pool: Tensor, edge: LayoutEdge) -> BlockRegion:
    return BlockRegion.of_pool(pool, KVLayout.from_geometry(SMALL), edge)


@pytest.mark.parametrize("edge", intersect([SMALL], split(SMALL, 2, 2)), ids=str)
def test_a_part_of_every_block_is_moved_as_it_is_copied(edge: LayoutEdge) -> None:
    """Between groups of other parallelism: some layers, some heads."""
    layout = KVLayout.from_geometry(SMALL)
    pool = torch.randn(layout.shape).to(torch.bfloat16)
    ids, into = [7, 2, 3, 11], [4, 0, 9, 8]
    outcomes = []
    for mover in (Counting(), None):
        slot = BlockRegion(torch.zeros(5, *edge.block_shape(layout), dtype=torch.bfloat16))
        target = torch.zeros_like(pool)
        gather_blocks(region(pool, edge), ids, slot, mover)
        assert scatter_blocks(slot, region(target, edge), into, mover, lambda: False)
        assert mover is None or mover.num_taken == 2
        outcomes.append((slot.blocks.view(torch.int16), target.view(torch.int16)))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


class Refusing:
    """A mover that does nothing, and says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def gather(self, cut: Cut, block_ids: Sequence[int], staging: Tensor, num_runs: int) -> bool:
        self.asked.append(("gather", num_runs))
        return False

    def scatter(self, staging: Tensor, cut: Cut, block_ids: Sequence[int], num_runs: int) -> bool:
        self.asked.append(("scatter", num_runs))
        return False


def test_what_no_kernel_takes_is_copied() -> None:
    [edge] = intersect([SMALL], [SMALL])
    layout, mover = KVLayout.from_geometry(SMALL), Refusing()
    pool, target = (
        torch.randn(layout.shape).to(torch.bfloat16),
        torch.zeros(layout.shape, dtype=torch.bfloat16),
    )
    slot = BlockRegion(torch.zeros(4, *layout.block_shape, dtype=torch.bfloat16))
    gather_blocks(region(pool, edge), [5, 6, 1], slot, mover)
    assert scatter_blocks(slot, region(target, edge), [0, 2, 3], mover, lambda: False)
    assert mover.asked == [("gather", 2), ("scatter", 2)]  # runs of neighbours
    assert torch.equal(target[[0, 2, 3]], pool[[5, 6, 1]])
    assert not scatter_blocks(slot, region(target, edge), [7], mover, lambda: True)  # closed meanwhile
    assert not target[7].any()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), launch.KernelError("no compiler")])
def test_a_kernel_that_cannot_run_leaves_it_to_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """For want of memory it is asked again; one that does not compile is not, and is told once."""
    calls = []

    def fail(*_: object, **__: object) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(block_mover.blocks, "gather_blocks", fail)
    mover = block_mover.BlockMover(always=True)
    pool = torch.zeros(KVLayout.from_geometry(SMALL).shape)
    mover.prepare(pool, 3)
    for _ in range(2):
        cut = Cut(pool, range(3), range(2))
        assert not mover.gather(cut, [1], torch.zeros(1, *pool.shape[1:]), 1)
    is_lasting = isinstance(error, launch.KernelError)
    assert len(calls) == (1 if is_lasting else 3)
    assert len(caplog.records) == is_lasting


def test_preparing_leaves_the_block_as_it_was() -> None:
    pool = torch.randn(KVLayout.from_geometry(SMALL).shape)
    before = pool.clone()
    block_mover.BlockMover().prepare(pool, 11)
    assert torch.equal(pool, before)


@given(st.integers(1, 4096), st.integers(1, 2**33))
def test_it_pays_by_how_many_copies_it_saves_and_never_where_the_device_is_the_slower_one(
    num_runs: int, num_bytes: int
) -> None:
    taken = block_mover.pays(num_runs, num_bytes)
    assert not (taken and num_runs == 1)  # one copy is the cheapest
    if taken:
        assert block_mover.pays(num_runs + 1, num_bytes)
        assert num_bytes / block_mover.DEVICE_BYTES_S < num_runs * block_mover.COPY_S
    assert block_mover.pays(64, 8 << 20)  # blocks of 128 KiB
    assert not block_mover.pays(4, 8 << 20)  # of 2 MiB
