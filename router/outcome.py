"""What a client is told when its request cannot be served: one sentence, no internals."""

from __future__ import annotations

from cluster.errors import (
    BatonError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    WorkerLost,
)
from cluster.request import RequestSpec
from cluster.wire.messages import AttemptFailed, Prefill, Reserve
from router.policy import Reject, RejectReason


def context_length_exceeded(spec: RequestSpec, limit_tokens: int) -> ContextLengthExceeded:
    """`limit_tokens` is the most prompt + output tokens that any worker could take."""
    num_prompt, num_output = len(spec.token_ids), spec.sampling.max_tokens
    return ContextLengthExceeded(
        f"This request needs room for {num_prompt + num_output} tokens ({num_prompt} in the prompt, "
        f"{num_output} to generate), but no more than {limit_tokens} fit. "
        "Shorten the prompt or lower max_tokens."
    )


BACKLOG = "the work that waits would delay its first token too long"
QUEUE_TOO_SLOW = "the requests that wait for room would not have gone in time"
_WHY = {
    RejectReason.BUSY: "no room became free in time",
    RejectReason.QUEUE_FULL: "its queue is full",
    RejectReason.BACKLOG: BACKLOG,
    RejectReason.QUEUE_TOO_SLOW: QUEUE_TOO_SLOW,
}


def rejection(reject: Reject, spec: RequestSpec, retry_after_s: float) -> BatonError:
    """Of a request that finds no place. `retry_after_s`: for reasons that bring no time of their own."""
    match reject.reason:
        case RejectReason.TOO_LARGE:
            return context_length_exceeded(spec, reject.limit_tokens)
        case RejectReason.NO_WORKER:
            return NotReady("No decode worker is ready.", retry_after_s=retry_after_s)
        case RejectReason.BACKLOG | RejectReason.QUEUE_TOO_SLOW:
            return overloaded(_WHY[reject.reason], max(1.0, reject.retry_after_s))
        case _:
            return overloaded(_WHY[reject.reason], retry_after_s)


def overloaded(why: str, retry_after_s: float) -> Overloaded:
    return Overloaded(f"The cluster is at its capacity: {why}.", retry_after_s=retry_after_s)


def worker_lost() -> WorkerLost:
    return WorkerLost("A worker that held this request was lost, and no other could go on with it.")


def message_too_long(message: Prefill | Reserve, why: str) -> AttemptFailed:
    """What comes back for a message that the wire refused to carry."""
    return AttemptFailed(
        request=message.request,
        attempt=message.attempt,
        code="message_too_long",
        message=why,
        retryable=False,
    )


def error_of_failed_attempt(failure: AttemptFailed) -> BatonError:
    """The client's fault stays the client's fault; the rest is ours. A worker's own words reach a client
    only where they are about the request."""
    match failure.code:
        case "too_large":
            return ContextLengthExceeded(failure.message)
        case "bad_request":
            return InvalidRequest(failure.message)
        case code:
            return InternalError(f"A worker could not go on with this request: {code}.")
