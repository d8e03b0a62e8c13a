"""The allocator's rules one by one; whole lives are in test_block_manager_properties."""

from __future__ import annotations

import pytest

from cluster.ids import BlockId
from cluster.kv.allocator import BlockAllocator, BlockError


def test_gives_each_block_once_and_then_none() -> None:
    allocator = BlockAllocator(3)
    assert {allocator.take() for _ in range(3)} == {0, 1, 2}
    assert allocator.take() is None
    assert allocator.num_free == 0
    allocator.check_integrity(())


def test_the_last_drop_makes_a_block_idle_and_its_owner_decides() -> None:
    allocator = BlockAllocator(1)
    block = allocator.take()
    assert block is not None
    allocator.retain(block)
    assert not allocator.drop(block)
    assert allocator.drop(block)
    assert allocator.num_free == 0
    allocator.check_integrity((block,))
    allocator.revive(block)
    assert allocator.references(block) == 1
    assert allocator.drop(block)
    allocator.give_back(block)
    assert allocator.num_free == 1
    allocator.check_integrity(())


@pytest.mark.parametrize("operation", ["retain", "drop", "revive", "give_back"])
def test_operations_on_a_free_block_are_refused(operation: str) -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(BlockError, match="block 0"):
        getattr(allocator, operation)(BlockId(0))
    allocator.check_integrity(())
    assert allocator.num_free == 2


@pytest.mark.parametrize("operation", ["revive", "give_back"])
def test_operations_for_idle_blocks_refuse_used_ones(operation: str) -> None:
    allocator = BlockAllocator(2)
    block = allocator.take()
    assert block is not None
    with pytest.raises(BlockError, match="not idle"):
        getattr(allocator, operation)(block)


@pytest.mark.parametrize("block", [-1, 2])
def test_ids_outside_the_pool_are_refused(block: int) -> None:
    with pytest.raises(BlockError, match="no such block"):
        BlockAllocator(2).retain(BlockId(block))


def test_integrity_check_notices_a_lost_idle_block() -> None:
    allocator = BlockAllocator(2)
    block = allocator.take()
    assert block is not None
    allocator.drop(block)
    with pytest.raises(BlockError, match="idle blocks disagree"):
        allocator.check_integrity(())


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockAllocator(0)
