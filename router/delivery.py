"""What the conductor hands to the gateway for one request, and what the gateway may say back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import BatonError
from cluster.ids import WorkerId
from cluster.request import RequestSpec
from cluster.sampling import FinishReason, TokenOutput


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The next tokens, in order, each exactly once; `finish_reason` is set on the last delivery."""

    outputs: tuple[TokenOutput, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer; nothing follows."""

    error: BatonError


Delivery = NewTokens | Failed


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Where the time of a request went; complete once its last delivery was made.

    `queue_s` covers arrival → prefill started, `prefill_s` prefill started → token 0 sampled,
    `kv_transfer_s` token 0 → decode started (0 for a local prefill), `decode_s` → last token.
    """

    cached_tokens: int
    attempts: int
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None
    queue_s: float
    prefill_s: float
    kv_transfer_s: float
    decode_s: float
    ttft_s: float


class RequestStream(Protocol):
    """One accepted request as the gateway sees it. Iterating ends after the delivery that carries a
    finish reason or a failure, or after `finish`/`abort`."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    def finish(self) -> None:
        """A stop string matched: no more tokens are wanted, the request counts as complete."""
        ...

    def abort(self, reason: str) -> None:
        """The client left: both legs free their blocks."""
        ...

    def summary(self) -> RequestSummary: ...


class RequestIntake(Protocol):
    """What the gateway needs of the conductor's driver."""

    def submit(self, spec: RequestSpec) -> RequestStream:
        """Accept a request.

        Raises:
            ServingError: not ready or overloaded; nothing was queued.
            ContextLengthExceeded: it can never fit any decode worker's pool.
        """
        ...
