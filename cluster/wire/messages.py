"""Every message between a router and a worker, in the order of a request's life.

1. A worker dials the router and sends `Register`; the router answers `Welcome`; `Heartbeat`s follow. A
   prefill worker that wants to is told who is there (`Partners`).
2. Router → D `Reserve`; D → router `Grant` or `Nack`. A local reserve also starts the prefill on D.
3. Router → P `Prefill`. P moves the prompt's KV to D (`cluster.wire.kv_messages`).
4. P → router `FirstToken`, without waiting for the transfer.
5. D → router `Committed` once it can decode, then one `Tokens` or `NextTokens` per step for all its requests.
6. Router → D `RenewLeases` while waiting; `Finish` or `Abort` to whoever holds state.

Plain frozen values; decoding validates types and refuses unknown tags and fields. What types cannot say, a
message has a `check` for: whoever writes it need not pay for that. Times are durations
in seconds: no process ever compares its clock with another's.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import msgspec

from cluster.ids import Attempt, Epoch, LeaseId, RequestId, RouterId, WorkerId
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from cluster.step_model import StepModel

PROTOCOL_VERSION = 11

LARGEST_RUN_BYTES = 1 << 18  # of some five thousand requests


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """What a worker says about itself."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class NackReason(Enum):
    """Why a decode worker does not take a request."""

    NO_BLOCKS = "no_blocks"  # not now: try elsewhere or later
    NO_SLOT = "no_slot"  # not now: as many sequences as it may run
    TOO_LARGE = "too_large"  # never: does not fit the whole pool
    DRAINING = "draining"


class PriorityClass(Enum):
    """What a request gives way to: batch work takes the time that interactive work leaves."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all messages: the tag is the class name."""


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a KV layout that travels: which layers and heads a rank holds, in what shape."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: str  # "bfloat16" | "float32" | "int8"


class SloTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request is promised, from the moment at which this is sent."""

    ttft_deadline_in_s: float  # until its next token is due, the first of this attempt; below 0: it is late
    tpot_s: float  # mean over the answer
    gap_s: float | None = None  # between any two tokens; None: no limit
    priority_class: PriorityClass = PriorityClass.INTERACTIVE


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gauges of one worker, taken at one moment. Seconds of work are those of its step model."""

    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences accepted but not yet in a step, or waiting for KV
    queued_prefill_tokens: int = 0  # prompt tokens accepted and not yet computed
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    steps: int = 0  # steps run since start: the pulse of the engine
    preemptions: int = 0
    leases: int = 0
    stale_messages: int = 0
    prefill_tokens_per_s: float = 0.0  # smoothed; 0 = not yet measured
    decode_step_s: float = 0.0  # smoothed; 0 = not yet measured
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    step_model: StepModel | None = None  # how long its steps take; None: it has not run any yet
    step_error: float = 0.0  # median of |actual / predicted - 1| over the latest steps
    step_error_p90: float = 0.0  # 90 % quantile of actual / predicted - 1: what a safe prediction adds
    on_time_prefill_s: float = 0.0  # queued prompts expected in time
    late_prefill_s: float = 0.0  # queued prompts that are late, demoted or of the batch class
    queued_load_s: float = (
        0.0  # what the prompts expected in time will add to each step here once they decode
    )
    decode_rows: int = 0  # sequences that decode: one token in each step
    decode_context: int = 0  # keys that those rows read in a step
    yielding_rows: int = 0  # of `decode_rows`, those that need not be in every step: late or batch work
    yielding_context: int = 0  # of `decode_context`, theirs
    late_rate: float = 0.0  # prefill seconds that prompts not on time get per second; 0: not measured
    on_time_share: float = 1.0  # of what decode leaves of a step: for prompts in time, beside overdue ones
    coming_rows: int = 0  # granted to decode here, their KV not complete
    coming_context: int = 0  # prompt tokens of those
    row_life_s: float = 0.0  # mean time that a sequence decodes here; 0 = not yet measured
    borrowed_pieces: int = 0  # of steps' work, done on cores of workers that rested
    drafts: int = 0  # tokens that were guessed
    right_drafts: int = 0  # of those


# ---- worker and router: membership ---------------------------------------------------------------


class Register(Message, frozen=True, kw_only=True):
    """Worker → router, first message of a stream."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    pid: int
    model: str
    fingerprint: str  # model, weights revision, dtype, backend: equal fingerprints give equal bits
    max_model_len: int
    max_num_seqs: int
    geometry: KVGeometry
    kv_address: str | None = None  # where P dials D for KV; decode workers only
    warm_edges: int = 0  # P: most that it makes before a request needs them; 0: it is told of nobody


class Welcome(Message, frozen=True, kw_only=True):
    """Router → worker: accepted."""

    router: RouterId
    heartbeat_interval_s: float
    link: int = 0  # which of the router's links this is; 0: it takes no lifelines


class Lifeline(Message, frozen=True, kw_only=True):
    """Worker → router, the one message of a second stream. Of it and the link's own stream, one ends at once
    when the worker's process is killed; with one stream alone, its memory is taken apart first."""

    link: int


class DecodePartner(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A decode worker that is here, and where it is dialled for KV."""

    worker: WorkerId
    epoch: Epoch
    kv_address: str


class Partners(Message, frozen=True, kw_only=True):
    """Router → P: who is here, prefill workers by name. `begins`: all of them, and what was said before is
    void; otherwise who has come since, perhaps in another role or epoch than before, and who has gone."""

    begins: bool
    prefill: list[WorkerId]
    decode: list[DecodePartner]
    gone: list[WorkerId]


class Refused(Message, frozen=True, kw_only=True):
    """Either side: this stream will not be used; the reason is one sentence."""

    reason: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Worker → router at every interval, and whenever its state changes."""

    state: WorkerState
    load: WorkerLoad


class Drain(Message, frozen=True, kw_only=True):
    """Router or launcher → worker: take no new work, finish what runs within the grace time."""

    grace_s: float


class Drained(Message, frozen=True, kw_only=True):
    """Worker → router: nothing of yours is left here."""


# ---- router → worker: requests -------------------------------------------------------------------


class Reserve(Message, frozen=True, kw_only=True):
    """Router → D: hold blocks for this attempt. `local` asks D to prefill the prompt itself.

    `token_ids` is the prompt plus, on a later attempt, the tokens already delivered; the first
    `num_prompt_tokens` of them are the client's prompt.
    """

    request: RequestId
    attempt: Attempt
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    lease_ttl_s: float
    local: bool
    slo: SloTargets | None = None  # None: the worker's defaults, from now


class Prefill(Message, frozen=True, kw_only=True):
    """Router → P: compute these tokens, sample the next one, ship KV past `skip_tokens` to D."""

    request: RequestId
    attempt: Attempt
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str
    decode_worker: WorkerId
    decode_epoch: Epoch
    kv_address: str
    lease: LeaseId
    skip_tokens: int  # whole blocks that D already holds
    slo: SloTargets | None = None  # None: the worker's defaults, from now


class RenewLeases(Message, frozen=True, kw_only=True):
    """Router → D: these attempts are still wanted."""

    leases: list[LeaseId]


class Finish(Message, frozen=True, kw_only=True):
    """Router → worker: the request is complete for the client (a stop string matched)."""

    request: RequestId
    attempt: Attempt


class Abort(Message, frozen=True, kw_only=True):
    """Router → worker: forget this attempt."""

    request: RequestId
    attempt: Attempt
    reason: str


# ---- worker → router: requests -------------------------------------------------------------------


class Grant(Message, frozen=True, kw_only=True):
    """D → router: blocks are held until the lease ends."""

    request: RequestId
    attempt: Attempt
    lease: LeaseId
    ttl_s: float
    cached_tokens: int  # tokens of whole blocks that D already holds


class Nack(Message, frozen=True, kw_only=True):
    """D → router: not taken."""

    request: RequestId
    attempt: Attempt
    reason: NackReason
    detail: str
    retry_after_s: float


class FirstToken(Message, frozen=True, kw_only=True):
    """Whoever prefilled → router: the attempt's first new token."""

    request: RequestId
    attempt: Attempt
    output: TokenOutput
    finish_reason: FinishReason | None
    cached_tokens: int  # prompt tokens whose KV was not computed but found
    queue_s: float  # accepted → first chunk started
    prefill_s: float  # first chunk started → token sampled


class Committed(Message, frozen=True, kw_only=True):
    """D → router: all KV is here and decoding goes on."""

    request: RequestId
    attempt: Attempt
    kv_bytes: int
    kv_transfer_s: float  # commit wait seen by D: first KvOpen → complete


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """New tokens of one request. `index` counts the generated tokens of the attempt before these,
    the first token included."""

    request: RequestId
    attempt: Attempt
    index: int
    outputs: list[TokenOutput]
    finish_reason: FinishReason | None = None


class Tokens(Message, frozen=True, kw_only=True):
    """D → router: all new tokens of one step."""

    rows: list[TokenRow]


class TokenRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests that go on together by a token per step: columns of what does not change from step to step."""

    requests: list[RequestId]
    attempts: list[Attempt]
    indices: list[int]  # of their tokens in the first step

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.attempts) == len(self.indices):
            raise ValueError("columns of a `TokenRun` are not of one length")


class NextTokens(Message, frozen=True, kw_only=True):
    """D → router: of a step, one more token of each request of a run, which goes on, and of which there is
    nothing else to say: what would be `rows` of `Tokens`."""

    run: bytes  # `TokenRun` by `pack_run`: the same bytes in all of its steps, written and read once
    num_on: int  # steps since its first
    token_ids: list[int]

    def check(self) -> None:
        if len(unpack_run(self.run).requests) != len(self.token_ids):
            raise ValueError("not a token for each request of a `TokenRun`")

    @property
    def rows(self) -> list[TokenRow]:
        run, num_on, outputs = unpack_run(self.run), self.num_on, map(TokenOutput, self.token_ids)
        columns = zip(run.requests, run.attempts, run.indices, outputs, strict=True)
        return [TokenRow(request, attempt, at + num_on, [output]) for request, attempt, at, output in columns]


pack_run = msgspec.msgpack.Encoder().encode
_run_decoder = msgspec.msgpack.Decoder(TokenRun)


@lru_cache(maxsize=64)  # the runs of so many workers are read once
def unpack_run(packed: bytes) -> TokenRun:
    """Raises:
    ValueError, msgspec.DecodeError: it is none.
    """
    if len(packed) > LARGEST_RUN_BYTES:
        raise ValueError(f"a run of {len(packed)} bytes is over the limit of {LARGEST_RUN_BYTES}")
    return _run_decoder.decode(packed)


class AttemptFailed(Message, frozen=True, kw_only=True):
    """Worker → router: this attempt cannot go on here. `code` is a slug, `message` one sentence."""

    request: RequestId
    attempt: Attempt
    code: str
    message: str
    retryable: bool


RouterToWorker = Welcome | Partners | Refused | Reserve | Prefill | RenewLeases | Finish | Abort | Drain
WorkerToRouter = (
    Register
    | Heartbeat
    | Grant
    | Nack
    | FirstToken
    | Committed
    | Tokens
    | NextTokens
    | AttemptFailed
    | Drained
    | Refused
)
