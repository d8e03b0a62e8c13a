"""Prefix caching, eviction order and copy-on-write, one rule a test."""

from __future__ import annotations

import pytest

from cluster import block_hash
from cluster.ids import BlockHash, BlockId
from cluster.kv.allocator import BlockError
from cluster.kv.block_manager import BlockCounts, BlockManager


def manager_of(num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, "model")


def cached(manager: BlockManager, tokens: list[int], salt: str = "") -> list[BlockId]:
    """Compute, publish and release a sequence."""
    blocks = manager.allocate(-(-len(tokens) // manager.block_size))
    assert blocks is not None
    manager.publish(blocks, tokens, salt)
    manager.release(blocks)
    return blocks


def peek(manager: BlockManager, tokens: list[int], salt: str = "") -> list[BlockId]:
    blocks = manager.match(tokens, salt)
    manager.release(blocks)
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    manager = manager_of(4)
    assert manager.allocate(5) is None
    assert manager.counts() == BlockCounts(used=0, cached=0, free=4)
    assert len(manager.allocate(4) or []) == 4
    assert manager.allocate(1) is None
    assert manager.allocate(0) == []


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_only_full_blocks_are_found(num_tokens: int) -> None:
    manager = manager_of(4)
    tokens = list(range(num_tokens))
    blocks = cached(manager, tokens)
    assert peek(manager, tokens) == blocks[: num_tokens // 4]
    assert manager.counts().cached == num_tokens // 4
    manager.check_integrity()


def test_a_hit_is_pinned() -> None:
    manager = manager_of(3)
    tokens = list(range(8))
    blocks = cached(manager, tokens)
    assert manager.match(tokens, "") == blocks
    assert manager.num_available == 1
    assert manager.allocate(2) is None
    manager.release(blocks)
    assert manager.allocate(3) is not None
    assert peek(manager, tokens) == []


def test_shared_blocks_stay_until_the_last_holder_leaves() -> None:
    manager = manager_of(4)
    tokens = list(range(8))
    blocks = cached(manager, tokens)
    manager.match(tokens, "")
    manager.match(tokens, "")
    manager.release(blocks)
    assert manager.counts().used == 2
    manager.release(blocks)
    assert manager.counts().used == 0


def test_tails_are_evicted_before_heads_and_old_chains_before_new() -> None:
    manager = manager_of(6)
    old, new = list(range(12)), list(range(100, 112))
    old_blocks, new_blocks = cached(manager, old), cached(manager, new)
    for left in (2, 1, 0):
        taken = manager.allocate(1)
        assert taken == [old_blocks[left]]
        assert peek(manager, old) == old_blocks[:left]
        assert peek(manager, new) == new_blocks
    manager.check_integrity()


def test_a_hit_makes_a_chain_recent() -> None:
    manager = manager_of(4)
    first, second = list(range(8)), list(range(100, 108))
    first_blocks = cached(manager, first)
    second_blocks = cached(manager, second)
    assert peek(manager, first) == first_blocks
    manager.allocate(2)
    assert peek(manager, second) == []
    assert peek(manager, first) == first_blocks
    assert second_blocks != first_blocks


def test_a_chain_released_head_first_leaves_nothing_unreachable() -> None:
    manager = manager_of(3)
    blocks = manager.allocate(3)
    assert blocks is not None
    manager.publish(blocks, list(range(12)), "")
    for block in blocks:
        manager.release([block])
    assert manager.allocate(1) is not None  # evicts the head, and with it what hung on it
    manager.check_integrity()
    assert manager.counts() == BlockCounts(used=1, cached=0, free=2)


def test_a_used_tail_survives_the_eviction_of_another_copy_of_its_head() -> None:
    manager = manager_of(4)
    tokens = list(range(8))
    head = cached(manager, tokens[:4])
    own = manager.allocate(2)  # computed the same head again, e.g. at the same time
    assert own is not None
    manager.publish(own, tokens, "")
    assert peek(manager, tokens) == [head[0], own[1]]
    manager.allocate(2)  # one free, one evicted: `head`
    manager.check_integrity()
    assert peek(manager, tokens) == []
    manager.publish(own, tokens, "")  # the sequence goes on and publishes again
    assert peek(manager, tokens) == own
    manager.check_integrity()


def test_publishing_again_changes_nothing_and_growth_is_added() -> None:
    manager = manager_of(4)
    tokens = list(range(14))
    blocks = manager.allocate(4)
    assert blocks is not None
    for end in (3, 4, 4, 9, 14, 14, 5):
        manager.publish(blocks, tokens[:end], "")
        manager.check_integrity()
    assert peek(manager, tokens) == blocks[:3]


def test_the_first_copy_of_a_prefix_is_kept() -> None:
    manager = manager_of(4)
    tokens = list(range(8))
    first, second = manager.allocate(2), manager.allocate(2)
    assert first is not None
    assert second is not None
    manager.publish(first, tokens, "")
    manager.publish(second, tokens, "")
    manager.release(second)
    assert manager.counts().free == 2
    manager.release(first)
    assert peek(manager, tokens) == first


def test_salts_do_not_share() -> None:
    manager = manager_of(4)
    tokens = list(range(8))
    blocks = cached(manager, tokens, "alice")
    assert peek(manager, tokens, "bob") == peek(manager, tokens, "") == []
    assert peek(manager, tokens, "alice") == blocks


@pytest.mark.parametrize("num_bits", [0, 1, 4])
def test_b057_colliding_hashes_never_give_wrong_blocks(
    monkeypatch: pytest.MonkeyPatch, num_bits: int
) -> None:
    strong = block_hash.chain_hash

    def weak(key: bytes, parent: BlockHash, packed_tokens: bytes) -> BlockHash:
        return BlockHash(bytes([strong(key, parent, packed_tokens)[0] & (2**num_bits - 1)]))

    monkeypatch.setattr(block_hash, "chain_hash", weak)
    manager = BlockManager(64, 2, "model")
    contents: dict[
        BlockId, tuple[str, tuple[int, ...]]
    ] = {}  # block -> salt and the prefix it was computed for
    num_hits = 0
    for step in range(600):
        tokens = [(step * 7 + i * (step % 5)) % 3 for i in range(step % 11)]
        salt = "ab"[step % 2]
        hit = manager.match(tokens, salt)
        num_hits += len(hit)
        for index, block in enumerate(hit):
            assert contents[block] == (salt, tuple(tokens[: (index + 1) * 2]))
        rest = manager.allocate(-(-len(tokens) // 2) - len(hit))
        assert rest is not None
        blocks = hit + rest
        for index in range(len(hit), len(blocks)):
            contents[blocks[index]] = (salt, tuple(tokens[: (index + 1) * 2]))
        manager.publish(blocks, tokens, salt)
        manager.release(blocks)
        manager.check_integrity()
    assert num_hits > 0


def test_writing_into_a_block_of_ones_own_needs_no_copy() -> None:
    manager = manager_of(1)
    [block] = manager.allocate(1) or []
    assert manager.make_writable(block) == (block, None)


def test_writing_into_a_shared_block_copies_it() -> None:
    manager = manager_of(2)
    [block] = manager.allocate(1) or []
    manager.fork([block])
    written = manager.make_writable(block)
    assert written is not None
    new, source = written
    assert source == block != new
    assert manager.counts().used == 2
    manager.release([block])  # the copy has run
    assert manager.make_writable(block) == (block, None)  # the other holder is alone now
    manager.release([block, new])
    assert manager.counts() == BlockCounts(used=0, cached=0, free=2)


def test_no_block_left_for_a_copy_changes_nothing() -> None:
    manager = manager_of(1)
    [block] = manager.allocate(1) or []
    manager.fork([block])
    assert manager.make_writable(block) is None
    manager.release([block, block])
    manager.check_integrity()


def test_a_published_block_that_is_written_leaves_the_cache() -> None:
    manager = manager_of(4)
    tokens = list(range(12))
    blocks = cached(manager, tokens)
    assert manager.match(tokens[:8], "") == blocks[:2]
    assert manager.make_writable(blocks[1]) == (blocks[1], None)
    manager.check_integrity()
    assert manager.counts() == BlockCounts(used=2, cached=0, free=2)
    assert peek(manager, tokens) == blocks[:1]


def test_resetting_the_cache_leaves_holders_alone() -> None:
    manager = manager_of(6)
    held, idle = list(range(8)), list(range(100, 108))
    blocks = cached(manager, held)
    cached(manager, idle)
    manager.match(held, "")
    manager.reset_cache()
    manager.check_integrity()
    assert manager.counts() == BlockCounts(used=2, cached=0, free=4)
    assert peek(manager, held) == peek(manager, idle) == []
    manager.release(blocks)
    assert manager.counts() == BlockCounts(used=0, cached=0, free=6)


def test_misuse_is_refused_and_changes_nothing() -> None:
    manager = manager_of(4)
    blocks = manager.allocate(2)
    assert blocks is not None
    free = next(BlockId(b) for b in range(4) if b not in blocks)
    for misuse in (
        lambda: manager.release([blocks[0], blocks[1], blocks[0]]),
        lambda: manager.release([blocks[0], free]),
        lambda: manager.fork([blocks[0], free]),
        lambda: manager.make_writable(free),
        lambda: manager.publish([blocks[0], free], list(range(8)), ""),
        lambda: manager.publish(blocks, list(range(12)), ""),
    ):
        with pytest.raises(BlockError):
            misuse()
        manager.check_integrity()
        assert manager.counts() == BlockCounts(used=2, cached=0, free=2)
    manager.publish(blocks, list(range(8)), "")
    with pytest.raises(BlockError, match="other tokens"):
        manager.publish(blocks, list(range(1, 9)), "")
    manager.release(blocks)
    with pytest.raises(BlockError):
        manager.release(blocks)


def test_work_per_block_does_not_grow_with_the_pool() -> None:
    """Counts hash computations and node visits rather than time: both follow the blocks touched."""
    for num_blocks in (64, 4096):
        manager = manager_of(num_blocks, block_size=1)
        for start in range(num_blocks):
            cached(manager, [start])
        calls = 0
        strong = block_hash.chain_hash

        def counting(key: bytes, parent: BlockHash, packed: bytes) -> BlockHash:
            nonlocal calls
            calls += 1
            return strong(key, parent, packed)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_hash, "chain_hash", counting)
            blocks = manager.allocate(8)
            assert blocks is not None
            tokens = list(range(1_000_000, 1_000_008))
            for end in range(1, 9):
                manager.publish(blocks, tokens[:end], "")
        assert calls == 8
