"""What this router believes a worker has cached: an approximation that costs no message.

1. Placing a request enters its block hashes for the workers it goes to; a finished request enters the
   hashes of prompt and answer for its decode worker, where the next turn of the chat finds them.
2. Beyond the worker's own number of blocks the least recently placed are forgotten, a chain's end first, as
   the worker's cache does.
3. A worker that restarts starts empty.

A wrong belief costs time, never correctness: workers match their own caches and verify token ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cluster.ids import BlockHash


class PrefixIndex:
    """Bounded set of block hashes in the order of their last use."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest run from the start of `hashes` that is known; changes nothing."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._hashes:
                return index
        return len(hashes)

    def insert(self, hashes: Sequence[BlockHash]) -> None:
        """Enter a chain, first block to last; of one longer than the bound, its head."""
        for block_hash in reversed(hashes[: self._max_blocks]):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)
