"""Which blocks of a pool are in use, and by how many: a free list and reference counts.

Life of a block:

1. *free*: in the free list. `take` makes it *used* with one reference.
2. *used*: `retain` and `drop` count references up and down.
3. *idle*: the last reference was dropped. The owner of the allocator decides at once: `give_back` to the
   free list, or keep its contents for reuse (the prefix cache) until `revive` or `give_back`.

Every operation is O(1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.errors import BatonError
from cluster.ids import BlockId


class BlockError(BatonError):
    """A bug of ours: blocks were used against the rules, or the books do not balance."""


class BlockAllocator:
    """Owns the free list and the reference counts of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive: {num_blocks}")
        self.num_blocks = num_blocks
        # A stack: the block freed last is the one most likely still in a CPU cache.
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._is_free = bytearray(b"\x01") * num_blocks
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block_id: BlockId) -> int:
        """How many hold this block; 0 for free and idle ones.

        Raises:
            BlockError: there is no such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise BlockError(f"no such block: {block_id}, the pool has {self.num_blocks}")
        return self._references[block_id]

    def first_unheld(self, block_ids: Iterable[BlockId]) -> BlockId | None:
        """The first of these that nobody holds; None: all are held.

        Raises:
            BlockError: there is no such block.
        """
        references = self._references
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise BlockError(f"no such block: {block_id}, the pool has {self.num_blocks}")
            if not references[block_id]:
                return block_id
        return None

    def is_idle(self, block_id: BlockId) -> bool:
        """Unreferenced but not in the free list."""
        return self.references(block_id) == 0 and not self._is_free[block_id]

    def take(self) -> BlockId | None:
        """A free block, now with one reference; None if there is none."""
        if not self._free:
            return None
        block_id = self._free.pop()
        self._is_free[block_id] = 0
        self._references[block_id] = 1
        return block_id

    def retain(self, block_id: BlockId) -> None:
        """One more reference to a used block."""
        if self.references(block_id) == 0:
            raise BlockError(f"block {block_id} is not in use and cannot be retained")
        self._references[block_id] += 1

    def drop(self, block_id: BlockId) -> bool:
        """One reference less; True if that was the last one and the block is now idle."""
        count = self.references(block_id)
        if count == 0:
            raise BlockError(f"block {block_id} is not in use and cannot be released")
        self._references[block_id] = count - 1
        return count == 1

    def revive(self, block_id: BlockId) -> None:
        """An idle block is used again, with one reference."""
        if self.references(block_id) or self._is_free[block_id]:
            raise BlockError(f"block {block_id} is not idle and cannot be revived")
        self._references[block_id] = 1

    def give_back(self, block_id: BlockId) -> None:
        """An idle block joins the free list."""
        if self.references(block_id) or self._is_free[block_id]:
            raise BlockError(f"block {block_id} is not idle and cannot be freed")
        self._is_free[block_id] = 1
        self._free.append(block_id)

    def check_integrity(self, idle_blocks: Collection[BlockId]) -> None:
        """Every block is exactly one of free, used and idle. `idle_blocks`: what the owner thinks is idle.

        Raises:
            BlockError: naming the first block that is not where it should be.
        """
        if len(set(self._free)) != len(self._free) or sum(self._is_free) != len(self._free):
            raise BlockError("a block is in the free list twice, or its free mark is wrong")
        for block_id in self._free:
            if not self._is_free[block_id] or self._references[block_id] != 0:
                raise BlockError(f"block {block_id} is in the free list and in use")
        states = enumerate(zip(self._references, self._is_free, strict=True))
        idle = {BlockId(block) for block, (count, is_free) in states if count == 0 and not is_free}
        if len(idle_blocks) != len(idle) or idle != set(idle_blocks):
            raise BlockError(f"idle blocks disagree: {sorted(idle ^ set(idle_blocks))}")
        if min(self._references) < 0:
            raise BlockError("a reference count is negative")
