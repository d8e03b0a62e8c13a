"""Blocks that decoding sequences take before they need them, so that steps need no decision.

1. A step goes on to the next one by itself as long as every row has a place for a token more. Each time rows
   are planned without a prompt, those that fill their last block soon take one more (`take_ahead`): among
   many rows there is always one that does. Blocks go where they were going anyway, up to 16 tokens sooner.
2. Drafts stand in blocks that are there (`cluster.engine.speculation`): `rows_with_room` says how far.

Only if more blocks are left than what is here may need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.engine.batch import Row
from cluster.engine.draft_policy import MOST_DRAFTS
from cluster.engine.sequence import Sequence
from cluster.kv.block_manager import BlockManager

AHEAD: Final = 16  # tokens that a row has a place for when its step is planned
assert AHEAD >= MOST_DRAFTS


def take_ahead(decoding: Iterable[Sequence], blocks: BlockManager, keep_free: int) -> None:
    """A sequence that will soon need another block takes it now, if more than `keep_free` are left. The last
    token of a request needs no place."""
    size = blocks.block_size
    for sequence in decoding:
        room = len(sequence.block_ids) * size
        if room >= len(sequence.token_ids) + AHEAD or room >= sequence.max_tokens_with_kv:
            continue
        if blocks.num_available > keep_free:
            sequence.block_ids += blocks.allocate(1) or ()


def rows_with_room(decoding: Iterable[Sequence], block_size: int) -> tuple[Row, ...]:
    """Each with its one token. Drafts stand in blocks that are there, and before a request's last token,
    which needs no KV."""
    return tuple(
        [
            sequence.row(1, min(len(sequence.block_ids) * block_size, sequence.max_tokens_with_kv))
            for sequence in decoding
        ]
    )
