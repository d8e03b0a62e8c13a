"""The seam between gateway and conductor: what is handed over for one request, what may be said back, and
what the gateway can see of the cluster. Values and protocols only; the conductor's driver implements them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from cluster.errors import BatonError
from cluster.ids import Epoch, WorkerId
from cluster.request import RequestSpec
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import Role, WorkerLoad
from router.placement_stats import PlacementStats


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """The next tokens, in order, each exactly once; `finish_reason` is set on the last delivery."""

    outputs: tuple[TokenOutput, ...]
    finish_reason: FinishReason | None


class Failed(msgspec.Struct, frozen=True):
    """The request ended without an answer; nothing follows."""

    error: BatonError


Delivery = NewTokens | Failed
Take = Callable[[Delivery | None], None]  # None: nothing follows; must not raise


class RequestSummary(msgspec.Struct, frozen=True):
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

    @classmethod
    def unknown(cls, attempts: int) -> RequestSummary:
        """Of a request of which no more is known than how often it was tried."""
        return cls(attempts=attempts, cached_tokens=0, prefill_worker=None, decode_worker=None,
                   queue_s=0.0, prefill_s=0.0, kv_transfer_s=0.0, decode_s=0.0, ttft_s=0.0)  # fmt: skip


class RequestStream(Protocol):
    """One accepted request as the gateway sees it. Iterating ends after the delivery that carries a
    finish reason or a failure, or after `finish`/`abort`."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    def push_to(self, take: Take | None) -> None:
        """Once the first delivery was read: from now on `take` gets what waits and what comes, at once and in
        order, instead of who iterates; with None, who iterates gets it again. `take` may call this too."""
        ...

    def finish(self) -> None:
        """A stop string matched: no more tokens are wanted, the request counts as complete."""
        ...

    def abort(self, reason: str) -> None:
        """The client left: both legs free their blocks. Does nothing when the request is over."""
        ...

    def summary(self) -> RequestSummary:
        """What is known so far; may be read at any time."""
        ...


class RequestIntake(Protocol):
    """What the gateway needs of the conductor's driver."""

    def submit(self, spec: RequestSpec) -> RequestStream:
        """Accept a request.

        Raises:
            ServingError: not ready or overloaded; nothing was queued.
            ContextLengthExceeded: it can never fit any decode worker's pool.
        """
        ...


@dataclass(frozen=True, slots=True)
class Readiness:
    """`phase` is a short slug a person can act on: "waiting_for_workers", "loading_model", "warming_up",
    "ready", "draining", "stopping"."""

    ready: bool
    phase: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the router sees it now."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    pid: int
    state: str  # "starting" | "ready" | "draining" | "lost" | "stuck"
    load: WorkerLoad
    heartbeat_age_s: float  # since its last sign of life
    max_num_seqs: int = 0  # sequences it runs at once; 0: not known


class StaleReason(Enum):
    """Why the router dropped a worker's message."""

    EPOCH = "epoch"  # its process was replaced, or was given up as dead or hung
    REQUEST = "request"  # the request is over
    ATTEMPT = "attempt"  # of an earlier attempt, a duplicate, or out of turn


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """`state` is "ready" when requests are served, else the phase of `Readiness`."""

    state: str
    queued: int  # requests accepted and not yet sent to any worker
    workers: tuple[WorkerStatus, ...]
    stale_messages: Mapping[StaleReason, int]
    placement: PlacementStats = field(default_factory=PlacementStats)  # goes on growing: read it at once
    role_shifts: Mapping[tuple[Role, Role], int] = field(default_factory=dict)  # (from, to) → workers


class ClusterStatus(Protocol):
    """What the gateway may see of the cluster; every call is a read of memory, never a wait."""

    def ready(self) -> Readiness: ...

    def cluster(self) -> ClusterSnapshot: ...

    def max_model_len(self) -> int | None:
        """Most tokens (prompt + output) one request may have on the workers that are here; None before
        any registered."""
        ...
