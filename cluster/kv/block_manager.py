"""The books of one worker's KV pool: allocation, sharing, and the prefix cache. Ids only, no tensors.

Life of a block:

1. `match` finds the cached head of a prompt and pins it; `allocate` gives the rest, evicting cached blocks
   that nobody references, least recently used first, when the free ones do not suffice.
2. `publish` enters a sequence's full blocks into the prefix index once their KV is computed. Partial
   blocks are never entered, hence never shared by `match`.
3. `fork` shares blocks between sequences of one request; `make_writable` separates one before a write.
4. `release` gives references back. A published block without references stays cached, another is free.

used (referenced) + cached (published, unreferenced) + free = `num_blocks`, always. Each operation is O(1)
per block it is given or evicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from cluster.ids import BlockHash, BlockId
from cluster.kv.allocator import BlockAllocator, BlockError
from cluster.kv.prefix import CacheChanges, PrefixIndex


class BlockCounts(msgspec.Struct, frozen=True):
    """Where the blocks of a pool are; the sum is the pool."""

    used: int
    cached: int
    free: int


class BlockManager:
    """Single owner of a pool's block state. Not thread-safe: one thread decides."""

    def __init__(self, num_blocks: int, block_size: int, namespace: str) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._allocator = BlockAllocator(num_blocks)
        self._prefix = PrefixIndex(block_size, namespace)

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can give now: free and evictable ones."""
        return self._allocator.num_free + self._prefix.num_parked

    def counts(self) -> BlockCounts:
        free, cached = self._allocator.num_free, self._prefix.num_parked
        return BlockCounts(used=self.num_blocks - free - cached, cached=cached, free=free)

    def match(self, token_ids: Sequence[int], salt: str) -> list[BlockId]:
        """Blocks of the longest cached run of full blocks, each with one more reference (the caller's).

        A prompt that is cached to its last token leaves nothing to compute; pass all but the last token where
        at least one must be computed.
        """
        block_ids = self._prefix.lookup(token_ids, salt)
        allocator = self._allocator
        for block_id in block_ids:
            if allocator.references(block_id):
                allocator.retain(block_id)
            else:
                self._prefix.unpark(block_id)
                allocator.revive(block_id)
        return block_ids

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """`num_blocks` blocks with one reference each and undefined contents; None (and no change) if there
        are not so many. Referenced blocks are never evicted."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative: {num_blocks}")
        allocator = self._allocator
        if num_blocks > (num_free := allocator.num_free):
            if num_blocks > num_free + self._prefix.num_parked:
                return None
            while allocator.num_free < num_blocks:
                self._free_idle(self._prefix.evict())
        taken = [block_id for _ in range(num_blocks) if (block_id := allocator.take()) is not None]
        assert len(taken) == num_blocks, "so many were available"
        return taken

    def publish(self, block_ids: Sequence[BlockId], token_ids: Sequence[int], salt: str) -> None:
        """Enter the full blocks of a sequence into the prefix index; see `PrefixIndex.publish`.

        Call it when the KV of `token_ids` is computed, with blocks the caller holds. Idempotent, and cheap
        for what was published before.

        Raises:
            BlockError: too few blocks, an unreferenced block, or one published for other tokens.
        """
        unheld = self._allocator.first_unheld(block_ids[: len(token_ids) // self.block_size])
        if unheld is not None:
            raise BlockError(f"block {unheld} is not in use and cannot be published")
        self._prefix.publish(block_ids, token_ids, salt)

    def fork(self, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each block: another sequence reads them too.

        Raises:
            BlockError: a block is not in use; nothing was changed.
        """
        unheld = self._allocator.first_unheld(block_ids)
        if unheld is not None:
            raise BlockError(f"block {unheld} is not in use and cannot be forked")
        for block_id in block_ids:
            self._allocator.retain(block_id)

    def make_writable(self, block_id: BlockId) -> tuple[BlockId, BlockId | None] | None:
        """Before the holder of a reference writes into a block: copy-on-write.

        Returns:
            `(block_id, None)` if no one else can see the block: write in place. A block that was published
            leaves the prefix index with all that hangs on it, since its contents change.
            `(new, block_id)` if others hold it: copy `block_id` to `new`, then write there. The caller now
            holds `new` and *still holds* `block_id`, which stays intact until the copy has run: release
            it then.
            None if others hold it and no block is left; nothing was changed.
        """
        references = self._allocator.references(block_id)
        if references == 0:
            raise BlockError(f"block {block_id} is not in use and cannot be written")
        if references == 1:
            if block_id in self._prefix:
                self._free_idle(self._prefix.remove(block_id))
            return block_id, None
        copy = self.allocate(1)
        return None if copy is None else (copy[0], block_id)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Give one reference to each block back. Pass a sequence's blocks in order, first to last: of those
        that become cached the last is evicted first.

        Raises:
            BlockError: more releases of a block than references to it; nothing was changed.
        """
        allocator, prefix = self._allocator, self._prefix
        if len(set(block_ids)) == len(block_ids):  # nearly always, and counting is slow
            unheld = allocator.first_unheld(block_ids)
        else:
            times = Counter(block_ids)
            unheld = next((b for b in times if allocator.references(b) < times[b]), None)
        if unheld is not None:
            raise BlockError(f"block {unheld} is released more often than it is held")
        for block_id in reversed(block_ids):
            if allocator.drop(block_id) and not prefix.park(block_id):
                allocator.give_back(block_id)

    def reset_cache(self) -> None:
        """Forget every published prefix; cached blocks become free, used ones stay with their holders."""
        self._free_idle(self._prefix.clear())

    def cached_hashes(self) -> list[BlockHash]:
        """Of all published blocks, used or not."""
        return self._prefix.hashes()

    def take_cache_changes(self) -> CacheChanges | None:
        """What was published and what was evicted since the last call; None: too much to tell one by one."""
        return self._prefix.take_changes()

    def check_integrity(self) -> None:
        """Check the whole books; O(num_blocks), for tests and for idle moments.

        Raises:
            BlockError: naming what does not balance.
        """
        self._prefix.check_integrity()
        self._allocator.check_integrity(self._prefix.parked)
        counts = self.counts()
        if counts.used + counts.cached + counts.free != self.num_blocks or counts.used < 0:
            raise BlockError(f"counts do not sum to {self.num_blocks}: {counts}")

    def _free_idle(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._allocator.give_back(block_id)
