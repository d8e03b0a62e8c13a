"""The life of a request: its states, the moves between them, and the events that time it."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from cluster.errors import BatonError
from cluster.ids import RequestId
from cluster.sampling import SamplingParams
from cluster.wire.messages import PriorityClass


class RequestState(Enum):
    """Where a request is; the conductor is the single writer."""

    QUEUED = auto()
    RESERVED = auto()  # a decode worker granted a lease
    PREFILLING = auto()  # a prefill worker (or the decode worker itself) computes the prompt
    STREAMING_KV = auto()  # token 0 is out, KV still on its way
    DECODING = auto()
    RETRY = auto()  # this attempt is over, the next one is being placed
    DONE = auto()
    ABORTED = auto()  # ended without an answer: the client left, or it failed

    __hash__ = object.__hash__  # an enum's own is Python; `TRANSITIONS` is asked at every move


_S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # DONE before a token of this attempt: the client found its stop string in what an earlier one delivered.
    _S.QUEUED: frozenset({_S.RESERVED, _S.RETRY, _S.DONE, _S.ABORTED}),
    _S.RESERVED: frozenset({_S.PREFILLING, _S.RETRY, _S.DONE, _S.ABORTED}),
    _S.PREFILLING: frozenset({_S.STREAMING_KV, _S.DECODING, _S.DONE, _S.RETRY, _S.ABORTED}),
    _S.STREAMING_KV: frozenset({_S.DECODING, _S.DONE, _S.RETRY, _S.ABORTED}),
    _S.DECODING: frozenset({_S.DONE, _S.RETRY, _S.ABORTED}),
    _S.RETRY: frozenset({_S.QUEUED, _S.ABORTED}),
    _S.DONE: frozenset(),
    _S.ABORTED: frozenset(),
}


class IllegalTransition(BatonError):
    """A bug of ours: the state machine was asked for a move that is not in the table."""


def transition(current: RequestState, target: RequestState) -> RequestState:
    """`target`, if the table allows the move.

    Raises:
        IllegalTransition: naming both states.
    """
    if target not in TRANSITIONS[current]:
        raise IllegalTransition(f"illegal request transition: {current.name} -> {target.name}")
    return target


class LifecycleEvent(Enum):
    """Timestamped moments of a request: the one source of metrics, SLO accounting and traces."""

    ARRIVED = auto()
    PLACED = auto()
    GRANTED = auto()
    PREFILL_SENT = auto()
    FIRST_TOKEN = auto()
    DECODE_STARTED = auto()  # KV complete on the decode worker, COMMIT accepted
    LAST_TOKEN = auto()
    RETRIED = auto()
    RESUMED = auto()  # the first token after a retry
    FINISHED = auto()
    ABORTED = auto()  # the client left
    FAILED = auto()  # it ended with an error


class RequestSlo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks to be promised; None: what the cluster promises everybody."""

    ttft_s: float | None = None  # arrival to first token
    tpot_s: float | None = None  # mean over the answer
    gap_s: float | None = None  # between any two tokens
    priority_class: PriorityClass = PriorityClass.INTERACTIVE


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request as the conductor accepts it: ids in, ids out."""

    request: RequestId
    token_ids: tuple[int, ...]  # the prompt
    sampling: SamplingParams
    cache_salt: str = ""
    deadline_s: float | None = None  # seconds after arrival until the request is worthless
    slo: RequestSlo = RequestSlo()
    priority: int = 0  # lower goes earlier among those of its tenant that wait for a place
    tenant: str = ""  # whose requests take turns with others' while they wait; empty: nobody's in particular
    share: float = 1.0  # of that tenant, beside the others'
    affinity: str = ""  # what requests that belong together have in common; empty: nothing known
    is_part: bool = False  # of a search: how long it gets says nothing of answers
    goes_on: bool = False  # with a reply that has begun: it is not turned away for the sake of others
