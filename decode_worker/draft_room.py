"""How far the drafts of decoding sequences may reach (`cluster.engine.speculation`)."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.engine.batch import Row
from cluster.engine.draft_policy import MOST_DRAFTS
from cluster.engine.sequence import Sequence
from cluster.kv.block_manager import BlockManager


def rows_with_room(decoding: Iterable[Sequence], blocks: BlockManager, keep_free: int) -> tuple[Row, ...]:
    """Each with its one token. Drafts stand in blocks that are there, and before a request's last token,
    which needs no KV. A sequence that will soon need another block takes it now, if more than `keep_free` are
    left."""
    rows = []
    for sequence in decoding:
        end, most = len(sequence.block_ids) * blocks.block_size, sequence.max_tokens_with_kv
        is_short = end < min(len(sequence.token_ids) + MOST_DRAFTS, most)
        if is_short and blocks.num_available > keep_free:
            sequence.block_ids += blocks.allocate(1) or ()
            end = len(sequence.block_ids) * blocks.block_size
        rows.append(sequence.row(1, min(end, most)))
    return tuple(rows)
