"""What a prefill and a decode worker say to one another on a KV stream, in the order of an attempt's life.

1. P dials D, once per pair: `EdgeHello`, `EdgeWelcome`.
2. P opens the attempt (`KvOpen`); D names its blocks (`KvOpened`) or refuses (`KvRefused`).
3. P announces each piece: `KvPiece` when the bytes already lie in place (shm), or `KvOffer` → `KvReady` → the
   bytes through torch.distributed (gloo, nccl).
4. `KvCommit` brings the first token; D answers `KvCommitted` once every block is there.
5. `KvAbort` asks the writer to stop; `KvClosed` is its promise that it has. D reuses blocks only then.

Apart from `cluster.wire.messages` because no router ever reads one of these. `Refused` ends either kind of
stream.
"""

from __future__ import annotations

from cluster.ids import Attempt, BlockId, Epoch, LeaseId, PieceIndex, RequestId, WorkerId
from cluster.sampling import TokenOutput
from cluster.wire.messages import KVGeometry, Message, Refused


class EdgeHello(Message, frozen=True, kw_only=True):
    """P → D, first message of a KV stream. It names whom it looks for: the successor of a decode worker that
    is gone may listen at the same address, and must not take it for a new dial to itself."""

    worker: WorkerId
    epoch: Epoch
    decode_worker: WorkerId
    decode_epoch: Epoch
    pid: int
    fingerprint: str
    kinds: list[str]  # "shm", "gloo", ...: what the edge may be, best first
    place: str  # see `cluster.process_place`
    geometry: KVGeometry
    warm: bool = False  # no request needs it yet: a worker that is busy refuses


class EdgeWelcome(Message, frozen=True, kw_only=True):
    """D → P: how to reach the pool. `kind` is what the edge is, `possible` what it could be between these
    two, `endpoint` what that kind needs (see `cluster.kv.edge`)."""

    worker: WorkerId
    epoch: Epoch
    kind: str
    possible: list[str]
    geometry: KVGeometry
    endpoint: dict[str, str | int]


class KvOpen(Message, frozen=True, kw_only=True):
    """P → D: about to move KV of this attempt."""

    request: RequestId
    attempt: Attempt
    lease: LeaseId


class KvOpened(Message, frozen=True, kw_only=True):
    """D → P: go on. `block_ids` are D's blocks for the whole prompt, the skipped ones included."""

    request: RequestId
    attempt: Attempt
    block_ids: list[BlockId]


class KvRefused(Message, frozen=True, kw_only=True):
    """D → P: this attempt has no lease here (any more). `piece`: the offer this answers; None: `KvOpen`."""

    request: RequestId
    attempt: Attempt
    reason: str
    piece: PieceIndex | None = None


class KvOffer(Message, frozen=True, kw_only=True):
    """P → D: the piece is gathered; post a receive."""

    request: RequestId
    attempt: Attempt
    piece: PieceIndex
    first_block: int  # index into the prompt's blocks
    num_blocks: int
    num_bytes: int


class KvReady(Message, frozen=True, kw_only=True):
    """D → P: the receive for this piece is posted."""

    request: RequestId
    attempt: Attempt
    piece: PieceIndex


class KvPiece(Message, frozen=True, kw_only=True):
    """P → D: the bytes of this piece lie in D's blocks already (in-place edges)."""

    request: RequestId
    attempt: Attempt
    piece: PieceIndex
    first_block: int
    num_blocks: int
    num_bytes: int


class KvCommit(Message, frozen=True, kw_only=True):
    """P → D: the prompt is complete; decode from this token once every block is there."""

    request: RequestId
    attempt: Attempt
    lease: LeaseId
    output: TokenOutput
    num_tokens: int  # tokens whose KV the prompt's blocks hold
    token_age_s: float = 0.0  # since the token was sampled: the client's stream has begun


class KvCommitted(Message, frozen=True, kw_only=True):
    """D → P: complete and decoding; P may reuse its blocks."""

    request: RequestId
    attempt: Attempt


class KvAbort(Message, frozen=True, kw_only=True):
    """Either → the other: this attempt moves no more KV."""

    request: RequestId
    attempt: Attempt
    reason: str


class KvMakeRoom(Message, frozen=True, kw_only=True):
    """D → P: another prefill worker needs an edge, and D holds as many as it may. P closes this one,
    unless it is in use: only P knows what is on its way."""


class KvClosed(Message, frozen=True, kw_only=True):
    """P → D: nothing of this attempt will be written any more; D may reuse its blocks."""

    request: RequestId
    attempt: Attempt


PrefillToDecode = EdgeHello | KvOpen | KvOffer | KvPiece | KvCommit | KvAbort | KvClosed | Refused
DecodeToPrefill = EdgeWelcome | KvOpened | KvRefused | KvReady | KvCommitted | KvAbort | KvMakeRoom | Refused
