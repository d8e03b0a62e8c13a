"""The name of a full block of tokens: what prefix caches and the router's placement agree on.

1. A *namespace* (the model fingerprint: equal namespaces give equal KV bits) becomes a BLAKE2b key.
2. The chain starts from a root digest of block size and cache salt.
3. Each full block's hash digests its parent's hash and its own token ids, so a hash names the whole
   prefix up to and including its block. A partial last block has no hash.

Every field is length-prefixed or of fixed width, so no two different inputs feed the same bytes: salt
"x" and namespace "x" are different keys, and tokens [12, 3] are not [1, 23]. BLAKE2b is keyed and strong,
but a hit is still verified by token ids where wrong KV could be served (`cluster.kv.prefix`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from cluster.ids import BlockHash

DIGEST_BYTES = 16
TOKEN_BYTES = 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, `TOKEN_BYTES` each.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@lru_cache
def namespace_key(namespace: str) -> bytes:
    """The BLAKE2b key of a namespace, 32 bytes, whatever the namespace's length."""
    return blake2b(namespace.encode(), digest_size=32, person=b"baton-namespace").digest()


@lru_cache
def root_hash(key: bytes, block_size: int, salt: str) -> BlockHash:
    """Where a chain begins: the parent of a first block."""
    salt_bytes = salt.encode()
    hasher = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"baton-root")
    hasher.update(block_size.to_bytes(8, "little"))
    hasher.update(len(salt_bytes).to_bytes(8, "little"))
    hasher.update(salt_bytes)
    return BlockHash(hasher.digest())


@lru_cache
def _block_hasher(key: bytes) -> blake2b:
    """What every block's hash begins with; a copy of it is made faster than another."""
    return blake2b(key=key, digest_size=DIGEST_BYTES, person=b"baton-block")


def chain_hash(key: bytes, parent: BlockHash, packed_tokens: bytes) -> BlockHash:
    """The hash of one full block, from its parent's and its own packed tokens."""
    hasher = _block_hasher(key).copy()
    hasher.update(parent + len(packed_tokens).to_bytes(8, "little") + packed_tokens)
    return BlockHash(hasher.digest())


def hash_blocks(token_ids: Sequence[int], block_size: int, namespace: str, salt: str) -> list[BlockHash]:
    """Hashes of the `len(token_ids) // block_size` full blocks of a token sequence, first to last."""
    if block_size <= 0:
        raise ValueError(f"block_size must be positive: {block_size}")
    key = namespace_key(namespace)
    num_full = len(token_ids) // block_size
    packed = pack_tokens(token_ids[: num_full * block_size])
    block_bytes = block_size * TOKEN_BYTES
    parent = root_hash(key, block_size, salt)
    hashes: list[BlockHash] = []
    for start in range(0, num_full * block_bytes, block_bytes):
        parent = chain_hash(key, parent, packed[start : start + block_bytes])
        hashes.append(parent)
    return hashes
