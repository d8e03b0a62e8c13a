"""What a worker says of its prefix cache, so that routers send prompts where their KV is.

1. On a new stream, and when a router asks with `KvResync`, the worker begins anew: `KvEvents` with `begins`
   and all it has, in one report or several.
2. From then on each report says what has entered and left since the one before. `sequence` counts a stream's
   reports; one that is missing voids everything until the worker begins anew.

Hashes are those of `cluster.block_hash`: equal on all workers of one fingerprint. Reports go through the
stream of the other messages, in order with them.
"""

from __future__ import annotations

import msgspec

from cluster.ids import BlockHash
from cluster.wire.messages import Lifeline, RouterToWorker, WorkerToRouter


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True):
    """Worker → router."""

    sequence: int
    begins: bool  # what was said before is void
    stored: list[BlockHash]
    removed: list[BlockHash]


class KvResync(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True):
    """Router → worker: a report was missing; begin anew."""


RouterSays = RouterToWorker | KvResync
WorkerSays = WorkerToRouter | KvEvents
DiallerSays = WorkerSays | Lifeline  # on any of its streams
