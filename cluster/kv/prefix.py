"""The prefix index: which blocks hold the KV of which token prefix, and which of them may go first.

Life of a cached block:

1. `publish` enters the full blocks of a sequence as a chain of nodes, each under its hash and its parent.
2. `lookup` walks a new prompt down from the root. A node is a hit only if its hash, its own token ids, its
   salt and its parent *node* are the expected ones, so a hash collision is a miss and never wrong KV.
3. `park` says that nobody references the block any more: it may be evicted, least recently parked first.
   `unpark` says that it is referenced again.
4. `evict` removes the block parked longest ago. Sequences are parked last block first, so a chain loses
   its tail before its head. Should a head go earlier all the same (it was parked earlier, or the chain
   hangs on another sequence's copy of it), the whole subtree leaves the index: it cannot be reached.

So a node's parent is always in the index. All operations cost O(1) per block they touch. What enters and
leaves is kept until `take_changes`: routers are told of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from cluster import block_hash
from cluster.ids import BlockHash, BlockId
from cluster.kv.allocator import BlockError

MAX_CHANGES = 1 << 16  # kept for `take_changes`; beyond, whoever asks has to look at all there is


class CacheChanges(msgspec.Struct, frozen=True):
    """What has entered and left a prefix index, each hash once, by its latest change."""

    stored: list[BlockHash]
    removed: list[BlockHash]


class _Node(msgspec.Struct, eq=False):
    """One published block; identity matters, a re-published prefix is another node."""

    block_id: BlockId
    hash: BlockHash
    packed_tokens: bytes
    salt: str
    parent: _Node | None
    children: dict[BlockId, _Node] = msgspec.field(default_factory=dict)


class PrefixIndex:
    """Owns the nodes and the eviction order; knows nothing of references or free lists."""

    def __init__(self, block_size: int, namespace: str) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive: {block_size}")
        self.block_size = block_size
        self._key = block_hash.namespace_key(namespace)
        self._by_hash: dict[BlockHash, _Node] = {}
        self._by_block: dict[BlockId, _Node] = {}
        self._parked: OrderedDict[BlockId, None] = OrderedDict()  # least recently parked first
        self._changes: dict[BlockHash, bool] | None = {}  # hash |-> whether it is here; None: too many

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def parked(self) -> tuple[BlockId, ...]:
        """Evictable blocks, the next to go first."""
        return tuple(self._parked)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._by_block

    def lookup(self, token_ids: Sequence[int], salt: str) -> list[BlockId]:
        """Blocks of the longest published run of full blocks from the start of `token_ids`."""
        found: list[BlockId] = []
        parent: _Node | None = None
        for hash_, packed in self._chain(token_ids, 0, salt, None):
            node = self._by_hash.get(hash_)
            if node is None or not self._is(node, packed, salt, parent):
                break
            found.append(node.block_id)
            parent = node
        return found

    def publish(self, block_ids: Sequence[BlockId], token_ids: Sequence[int], salt: str) -> None:
        """Enter the full blocks of a sequence. `block_ids[i]` holds tokens [i·block_size, (i+1)·block_size).

        A prefix that is already present keeps its block, and what follows hangs on that. At a hash collision
        with another prefix the rest stays out of the index. Blocks published before are skipped without
        hashing them again, so calling this whenever a sequence grows costs only what is new.

        Raises:
            BlockError: too few blocks for the tokens, or a block was published for other tokens.
        """
        num_full = len(token_ids) // self.block_size
        if len(block_ids) < num_full:
            raise BlockError(f"{num_full} full blocks of tokens but only {len(block_ids)} blocks")
        start, parent = self._last_published(block_ids, num_full)
        if parent is not None:
            own = token_ids[(start - 1) * self.block_size : start * self.block_size]
            if parent.packed_tokens != block_hash.pack_tokens(own) or parent.salt != salt:
                raise BlockError(f"block {parent.block_id} was published for other tokens")
        if start == num_full:
            return
        for index, (hash_, packed) in enumerate(self._chain(token_ids, start, salt, parent), start):
            node = self._by_hash.get(hash_)
            if node is None:
                node = _Node(block_ids[index], hash_, packed, salt, parent)
                self._by_hash[hash_] = self._by_block[node.block_id] = node
                self._note(hash_, is_here=True)
                if parent is not None:
                    parent.children[node.block_id] = node
            elif not self._is(node, packed, salt, parent):
                return
            parent = node

    def park(self, block_id: BlockId) -> bool:
        """The block is unreferenced: evictable, as the most recently used one. False: it is not published."""
        if block_id not in self._by_block:
            return False
        if block_id in self._parked:
            raise BlockError(f"block {block_id} is parked already")
        self._parked[block_id] = None
        return True

    def unpark(self, block_id: BlockId) -> None:
        """The block is referenced again. Nothing changes if it was not parked."""
        self._parked.pop(block_id, None)

    def evict(self) -> list[BlockId]:
        """Remove the least recently parked block and all that hangs on it.

        Returns:
            The parked blocks among them, tails first: they are free now. Empty if nothing is parked.
        """
        if not self._parked:
            return []
        return self.remove(next(iter(self._parked)))

    def remove(self, block_id: BlockId) -> list[BlockId]:
        """Take a published block and all that hangs on it out of the index; returns as `evict`."""
        top = self._by_block[block_id]
        if top.parent is not None:
            del top.parent.children[block_id]
        subtree = [top]
        for node in subtree:  # grows while it is read: parents before children
            subtree.extend(node.children.values())
        freed: list[BlockId] = []
        for node in reversed(subtree):
            del self._by_hash[node.hash]
            del self._by_block[node.block_id]
            self._note(node.hash, is_here=False)
            if node.block_id in self._parked:
                del self._parked[node.block_id]
                freed.append(node.block_id)
        return freed

    def clear(self) -> list[BlockId]:
        """Empty the index; returns the blocks that were parked."""
        freed = list(self._parked)
        for hash_ in self._by_hash:
            self._note(hash_, is_here=False)
        self._by_hash.clear()
        self._by_block.clear()
        self._parked.clear()
        return freed

    def hashes(self) -> list[BlockHash]:
        """Of all published blocks, parents before their children."""
        return list(self._by_hash)

    def take_changes(self) -> CacheChanges | None:
        """Since the last call. None: there were too many to keep; `hashes` says what is here."""
        changes, self._changes = self._changes, {}
        if changes is None:
            return None
        stored = [hash_ for hash_, is_here in changes.items() if is_here]
        return CacheChanges(stored, [hash_ for hash_, is_here in changes.items() if not is_here])

    def check_integrity(self) -> None:
        """Both maps hold the same nodes, parents and children agree, parked blocks are published.

        Raises:
            BlockError: naming the block.
        """
        if len(self._by_hash) != len(self._by_block):
            raise BlockError(f"{len(self._by_hash)} hashes but {len(self._by_block)} published blocks")
        for block_id, node in self._by_block.items():
            if node.block_id != block_id or self._by_hash.get(node.hash) is not node:
                raise BlockError(f"block {block_id} is published under another name")
            if node.parent is not None and (
                self._by_block.get(node.parent.block_id) is not node.parent
                or node.parent.children.get(block_id) is not node
            ):
                raise BlockError(f"block {block_id} has lost its parent")
            if node.children and any(child.parent is not node for child in node.children.values()):
                raise BlockError(f"block {block_id} has a child that is not its own")
        if not self._parked.keys() <= self._by_block.keys():
            raise BlockError("a parked block is not published")

    def _note(self, hash_: BlockHash, *, is_here: bool) -> None:
        if self._changes is not None:
            self._changes[hash_] = is_here
            if len(self._changes) > MAX_CHANGES:
                self._changes = None

    def _chain(
        self, token_ids: Sequence[int], start: int, salt: str, parent: _Node | None
    ) -> Iterator[tuple[BlockHash, bytes]]:
        """(hash, packed tokens) of the full blocks from index `start`, whose parent is given."""
        num_full = len(token_ids) // self.block_size
        packed = block_hash.pack_tokens(token_ids[start * self.block_size : num_full * self.block_size])
        block_bytes = self.block_size * block_hash.TOKEN_BYTES
        hash_ = block_hash.root_hash(self._key, self.block_size, salt) if parent is None else parent.hash
        for offset in range(0, len(packed), block_bytes):
            own = packed[offset : offset + block_bytes]
            hash_ = block_hash.chain_hash(self._key, hash_, own)
            yield hash_, own

    def _last_published(self, block_ids: Sequence[BlockId], num_full: int) -> tuple[int, _Node | None]:
        """One past the last of the first `num_full` blocks that is in the index, and its node."""
        for index in range(num_full - 1, -1, -1):
            node = self._by_block.get(block_ids[index])
            if node is not None:
                return index + 1, node
        return 0, None

    @staticmethod
    def _is(node: _Node, packed: bytes, salt: str, parent: _Node | None) -> bool:
        return node.parent is parent and node.packed_tokens == packed and node.salt == salt
