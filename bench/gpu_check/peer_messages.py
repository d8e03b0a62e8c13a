"""What the two processes of a transfer check say to one another: a JSON value per line, typed. No torch."""

from __future__ import annotations

import msgspec

from cluster.sampling import TokenOutput
from cluster.wire.messages import KVGeometry


class Dial(msgspec.Struct, frozen=True, kw_only=True, tag="dial"):
    """Be the prefill worker of an edge of `kind`. The pool has `geometry`, and bytes drawn from `seed` if
    given."""

    kind: str
    prefill: str
    prefill_epoch: int
    decode: str
    geometry: KVGeometry  # of both pools
    endpoint: dict[str, str | int]
    slot_bytes: int
    seed: int | None = None


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """Send these blocks as piece `index` of attempt 1."""

    index: int
    sources: list[int]


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag="compute"):
    """Compute prompts in chunks and write every block into D's pool as it is finished; the edge is in
    place."""

    backend: str
    model: str
    dtype: str
    prompts: list[list[int]]
    chunk: int
    num_tokens: int  # that each request generates in all
    target_blocks: list[list[int]]
    num_threads: int  # on a CPU: as many as the other process has


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The answer to each of these. `outputs`: token 0 of each prompt; `error`: why it could not be done."""

    error: str | None = None
    num_bytes: int = 0
    outputs: list[TokenOutput] = []


ToPeer = Dial | Send | Compute
