"""What goes into the conductor and what comes out of it: the seam between decisions and IO.

The driver turns streams, clients and timers into events and carries the actions out in their order.
"""

from __future__ import annotations

import msgspec

from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.messages import Register
from router.delivery import Delivery, RequestSummary

# ---- events --------------------------------------------------------------------------------------


class Submitted(msgspec.Struct, frozen=True):
    """The gateway accepted a request; its id is new."""

    spec: RequestSpec


class ClientFinished(msgspec.Struct, frozen=True):
    """A stop string matched: the request is complete for its client."""

    request: RequestId


class ClientLeft(msgspec.Struct, frozen=True):
    request: RequestId
    reason: str


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker registered. A newer epoch of a known worker replaces the old one, which is lost."""

    register: Register


class WorkerGone(msgspec.Struct, frozen=True):
    """The stream of this worker's epoch broke, or it was closed because its heartbeats stayed out."""

    worker: WorkerId
    epoch: Epoch
    reason: str


class FromWorker(msgspec.Struct, frozen=True):
    worker: WorkerId
    epoch: Epoch
    message: WorkerSays


class Tick(msgspec.Struct, frozen=True):
    """`next_deadline()` passed."""


Event = Submitted | ClientFinished | ClientLeft | WorkerJoined | WorkerGone | FromWorker | Tick


# ---- actions -------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    worker: WorkerId
    message: RouterSays


class Deliver(msgspec.Struct, frozen=True):
    """To the client; nothing follows a delivery with a finish reason or a failure."""

    request: RequestId
    delivery: Delivery


class Lifecycle(msgspec.Struct, frozen=True):
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


class Ended(msgspec.Struct, frozen=True):
    """The last action of every request, exactly once: nothing of it remains in the conductor."""

    request: RequestId
    summary: RequestSummary


Action = Send | Deliver | Lifecycle | Ended
