"""What goes into the conductor and what comes out of it: the seam between decisions and IO.

The driver turns streams, clients and timers into events and carries the actions out in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.messages import Register
from router.delivery import Delivery, RequestSummary

# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The gateway accepted a request; its id is new."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class ClientFinished:
    """A stop string matched: the request is complete for its client."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ClientLeft:
    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker registered. A newer epoch of a known worker replaces the old one, which is lost."""

    register: Register


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The stream of this worker's epoch broke, or it was closed because its heartbeats stayed out."""

    worker: WorkerId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    worker: WorkerId
    epoch: Epoch
    message: WorkerSays


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline()` passed."""


Event = Submitted | ClientFinished | ClientLeft | WorkerJoined | WorkerGone | FromWorker | Tick


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    worker: WorkerId
    message: RouterSays


class Deliver(msgspec.Struct, frozen=True):
    """To the client; nothing follows a delivery with a finish reason or a failure."""

    request: RequestId
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A timed moment of a request: what metrics, SLO accounting and traces are made of.

    `worker` is the one concerned, where there is one. `num_tokens` counts prompt tokens at ARRIVED and
    generated tokens at LAST_TOKEN, FINISHED, ABORTED and FAILED; `kv_bytes` and `kv_transfer_s` belong to
    DECODE_STARTED; `detail` says why at RETRIED, ABORTED and FAILED, and how long it took at RESUMED; it may
    name internals: for logs only.
    """

    request: RequestId
    event: LifecycleEvent
    at: float
    worker: WorkerId | None = None
    num_tokens: int = 0
    kv_bytes: int = 0
    kv_transfer_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last action of every request, exactly once: nothing of it remains in the conductor."""

    request: RequestId
    summary: RequestSummary


Action = Send | Deliver | Lifecycle | Ended
