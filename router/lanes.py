"""One request as a lane: the stages it went through, folded from its lifecycle events. Pure.

Life of a lane:

1. ARRIVED opens it in its queue stage (`open_lane`); `advance` takes what follows.
2. PLACED names the decode worker, PREFILL_SENT the prefill worker: prefill stage. FIRST_TOKEN: transfer
   stage, and the prefill's true begin becomes known (a prefill worker has a queue too). DECODE_STARTED:
   decode stage.
3. RETRIED sends it back to the queue stage with one attempt more; RESUMED means that it decodes.
4. `close` ends it with the last lifecycle event and the summary of its `Ended`.

The page draws lanes (`router.page_feed`), traces are made of them (`router.traces`). No text, no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.ids import RequestId, WorkerId
from cluster.request import LifecycleEvent
from router.conductor_io import Lifecycle
from router.delivery import RequestSummary

MAX_SPANS = 16  # of one lane: five attempts; later ones prolong the last span

_E = LifecycleEvent


class Stage(Enum):
    """Where a request spends its time."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"  # its first token is out, its KV on the way
    DECODE = "decode"


class End(Enum):
    """How a request ended."""

    FINISHED = "finished"
    LEFT = "left"  # the client left; says nothing about us
    FAILED = "failed"


ENDS = {_E.FINISHED: End.FINISHED, _E.ABORTED: End.LEFT, _E.FAILED: End.FAILED}


@dataclass(slots=True)
class Span:
    """A stage and when it began; it lasts until the next span begins or the lane ends."""

    stage: Stage
    at: float


@dataclass(slots=True)
class Lane:
    """Times are the router's clock; spans begin in order, neighbours differ in stage."""

    request: RequestId
    num_prompt_tokens: int
    spans: list[Span]
    prefill: WorkerId | None = None  # the decode worker, when it prefills itself
    decode: WorkerId | None = None
    num_attempts: int = 1
    num_cached_tokens: int = 0
    num_tokens: int = 0  # generated; known at the end
    kv_bytes: int = 0
    end: End | None = None
    ended_at: float | None = None
    change: int = 0  # number of its last change, for whoever counts them

    def enter(self, stage: Stage, now: float) -> None:
        """Begin a stage; one that took no time leaves no trace."""
        last = self.spans[-1]
        if last.stage is stage:
            return
        if now <= last.at and len(self.spans) > 1:
            self.spans.pop()
            self.enter(stage, now)
        elif len(self.spans) < MAX_SPANS:
            self.spans.append(Span(stage, max(now, last.at)))


def open_lane(arrival: Lifecycle) -> Lane:
    return Lane(arrival.request, arrival.num_tokens, [Span(Stage.QUEUE, arrival.at)])


def advance(lane: Lane, life: Lifecycle, summary: RequestSummary | None = None) -> None:
    """Take an event after ARRIVED; `summary` is what is known of the request, wanted at FIRST_TOKEN."""
    match life.event:
        case _E.PLACED:
            lane.decode = life.worker
        case _E.PREFILL_SENT:
            lane.prefill = life.worker
            lane.enter(Stage.PREFILL, life.at)
        case _E.FIRST_TOKEN:
            _note_prefill(lane, life.at, summary)
            if lane.spans[-1].stage is not Stage.DECODE:  # KV may be there first
                lane.enter(Stage.TRANSFER, life.at)
        case _E.DECODE_STARTED:
            lane.kv_bytes = life.kv_bytes
            lane.enter(Stage.DECODE, life.at)
        case _E.RESUMED:
            lane.enter(Stage.DECODE, life.at)
        case _E.RETRIED:
            lane.num_attempts += 1
            lane.enter(Stage.QUEUE, life.at)


def close(lane: Lane, last: Lifecycle, summary: RequestSummary) -> None:
    """`last` is FINISHED, ABORTED or FAILED."""
    lane.end = ENDS[last.event]
    lane.ended_at = max(last.at, lane.spans[-1].at)
    lane.num_tokens = last.num_tokens
    lane.num_cached_tokens = summary.cached_tokens


def tpot_s(num_tokens: int, summary: RequestSummary) -> float | None:
    """(last token - first token) / (tokens - 1); None for fewer than two tokens."""
    return (summary.kv_transfer_s + summary.decode_s) / (num_tokens - 1) if num_tokens > 1 else None


def _note_prefill(lane: Lane, now: float, summary: RequestSummary | None) -> None:
    """The first attempt's prefill began when its worker came to it, not when it was sent there."""
    if summary is None:
        return
    lane.num_cached_tokens = summary.cached_tokens
    if lane.num_attempts == 1 and len(lane.spans) == 2 and lane.spans[1].stage is Stage.PREFILL:
        began_at = lane.spans[0].at + summary.queue_s
        lane.spans[1].at = min(max(began_at, lane.spans[1].at), now)
