"""One request in the conductor's hands: its state, its current attempt, and which token comes next.

Token indices count the generated tokens of the *request* from 0. An attempt starts at `base`: the tokens that
earlier attempts delivered, which it was given as part of its input. Two streams bring its tokens: the
prefilling worker's brings token `base`, the decode worker's brings the rest in order. They are
not ordered against each other, so decode tokens that overtake the first one wait in `early`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from cluster.errors import BatonError
from cluster.ids import Attempt, BlockHash, LeaseId, RequestId, WorkerId
from cluster.request import RequestSlo, RequestSpec, RequestState, transition
from cluster.sampling import FinishReason, TokenOutput
from cluster.slo_classes import Targets
from cluster.wire.messages import FirstToken, PriorityClass, SloTargets, TokenRow
from router.affinity import Near
from router.delivery import NewTokens, RequestSummary
from router.policy import PlacementRequest

BATCH_PATIENCE = 10  # times as long as interactive requests may batch ones wait for their first token


class Order(Enum):
    """How a row of tokens relates to what has come before."""

    NEW = auto()
    DUPLICATE = auto()  # every token of it is known
    GAP = auto()  # a token is missing, and on an ordered stream it will not come


class AttemptRecord(msgspec.Struct):
    """One try on one pair. `*_holds`: the worker may hold state of it, so its end must be told there."""

    number: Attempt
    base: int  # index of this attempt's first token
    decode: WorkerId
    prefill: WorkerId | None  # None: the decode worker prefills
    predicted_ttft_s: float
    placed_at: float
    decode_holds: bool = True
    prefill_holds: bool = False
    lease: LeaseId | None = None
    has_first_token: bool = False
    next_row: int = 0  # index the decode worker's stream brings next; set in __post_init__
    early: list[TokenOutput] = msgspec.field(default_factory=list)
    early_finish: FinishReason | None = None
    queue_s: float = 0.0  # as the prefilling worker told with the first token
    prefill_s: float = 0.0
    first_token_at: float | None = None
    kv_bytes: int = 0  # handed over, once it is committed

    def __post_init__(self) -> None:
        self.next_row = self.base + 1

    @property
    def prefiller(self) -> WorkerId:
        """Who computes the prompt."""
        return self.prefill or self.decode

    def take_row(self, row: TokenRow) -> tuple[Order, Sequence[TokenOutput]]:
        """Classify a decode row (its `index` is relative to the attempt); with NEW, its new tokens."""
        start = self.base + row.index
        if start > self.next_row:
            return Order.GAP, ()
        new = row.outputs[self.next_row - start :]
        if not new:
            return Order.DUPLICATE, ()
        self.next_row += len(new)
        return Order.NEW, new


class LiveRequest(msgspec.Struct):
    """Everything the conductor knows of a request that is not over."""

    request: RequestId
    spec: RequestSpec
    arrived_at: float
    deadline_at: float | None
    order: int  # of service: by priority, then by arrival
    targets: Targets  # from its arrival on
    hashes: tuple[BlockHash, ...] = ()  # of the prompt's full blocks
    state: RequestState = RequestState.QUEUED
    attempt: AttemptRecord | None = None  # None while it waits for a place
    num_attempts: int = 1  # the current one included; a RESERVE that was refused does not count
    num_failed: int = 0  # attempts that failed; those that a draining worker handed over did not
    num_reserves: int = 0  # each has its own attempt number, so what one was answered never meets another
    output_ids: list[int] = msgspec.field(default_factory=list)  # delivered
    avoid: set[WorkerId] = msgspec.field(default_factory=set)  # an attempt failed there
    too_large_for: set[WorkerId] = msgspec.field(default_factory=set)  # said they can never hold it
    retry_after_s: float = 0.0  # what the last decode worker without room said
    cause: BatonError | None = None  # why the last attempt ended; what the client gets if nothing else works
    wait_until: float = 0.0  # end of the present wait for a place
    found_full_at: int = -1  # `ClusterView.abilities` when nobody had room for it
    is_recovering: bool = False  # it waits for a worker to come back, not for room
    retried_at: float | None = None  # when the last attempt ended, until a token of the next one is here
    # times of what the client waits for; the first of each counts
    first_token_at: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    prefill_sent_at: float | None = None
    decode_started_at: float | None = None
    last_token_at: float | None = None
    last_prefill: WorkerId | None = None
    last_decode: WorkerId | None = None

    @property
    def num_tokens(self) -> int:
        """That the next attempt prefills."""
        return len(self.spec.token_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Prompt and answer, if it is as long as it may be."""
        return len(self.spec.token_ids) + self.spec.sampling.max_tokens

    def is_as_large_as(self, other: LiveRequest) -> bool:
        """Both now and when it has all it asks for."""
        return self.num_tokens >= other.num_tokens and self.most_tokens >= other.most_tokens

    def move(self, target: RequestState) -> None:
        """The one place where a request's state changes.

        Raises:
            IllegalTransition: a bug of ours.
        """
        self.state = transition(self.state, target)

    def input_ids(self) -> list[int]:
        """What the next attempt prefills: the prompt and what has been delivered."""
        return [*self.spec.token_ids, *self.output_ids]

    def retry(self, cause: BatonError, avoid: set[WorkerId], now: float, wait_until: float) -> None:
        """Its attempt has failed, and nothing of it is held any more: it waits for another place."""
        self.move(RequestState.RETRY)
        self.cause = cause
        self.avoid |= avoid
        self.num_attempts += 1
        self.is_recovering = True
        self.retried_at = now if self.retried_at is None else self.retried_at
        self.wait_until = wait_until
        self.move(RequestState.QUEUED)

    def take_tokens(
        self, outputs: Sequence[TokenOutput], finish: FinishReason | None, now: float
    ) -> NewTokens:
        """The client's next delivery: never more than it asked for, whatever a worker sends."""
        room = self.spec.sampling.max_tokens - len(self.output_ids)
        if len(outputs) >= room:
            outputs, finish = outputs[:room], finish or FinishReason.LENGTH
        for output in outputs:
            self.output_ids.append(output.token_id)
        self.last_token_at = now
        return NewTokens(tuple(outputs), finish)

    def due_at(self) -> float:
        """When its next token is due: the first by its TTFT, the others by their mean pace."""
        if self.first_token_at is None:
            return self.arrived_at + self.targets.ttft_s
        return self.first_token_at + len(self.output_ids) * self.targets.tpot_s

    def slo(self, now: float) -> SloTargets:
        """What its workers are told."""
        gap_s = self.targets.gap_s
        return SloTargets(
            ttft_deadline_in_s=self.due_at() - now,
            tpot_s=self.targets.tpot_s,
            gap_s=gap_s if math.isfinite(gap_s) else None,
            priority_class=self.spec.slo.priority_class,
        )

    def placement_request(
        self, expected_output: float, max_backlog_s: float, now: float, near: Near | None = None
    ) -> PlacementRequest:
        """What placement needs to know to place the next attempt. `expected_output`: of such a prompt;
        `near`: where its session was last."""
        targets, max_tokens = self.targets, self.spec.sampling.max_tokens
        max_wait_s = math.inf  # one that had a place is not turned away
        if self.num_reserves == 0 and not self.spec.goes_on:
            times = BATCH_PATIENCE if self.spec.slo.priority_class is PriorityClass.BATCH else 1
            longest_s = max(times * max_backlog_s, targets.ttft_s)
            max_wait_s = max(0.0, longest_s - (now - self.arrived_at))
        return PlacementRequest(
            num_tokens=self.num_tokens,
            num_prompt_tokens=len(self.spec.token_ids),
            max_tokens=max_tokens,
            hashes=self.hashes,
            targets=Targets(max(0.0, self.due_at() - now), targets.tpot_s, targets.gap_s),
            expected_output=max(1.0, min(expected_output, max_tokens) - len(self.output_ids)),
            max_wait_s=max_wait_s,
            avoid=frozenset(self.avoid),
            too_large_for=frozenset(self.too_large_for),
            near=near,
        )

    def note_first_token(self, message: FirstToken, now: float) -> None:
        """Token 0 is here: the times before it are known."""
        sent_at = self.arrived_at if self.prefill_sent_at is None else self.prefill_sent_at
        self.first_token_at = now
        self.prefill_s = message.prefill_s
        self.queue_s = sent_at - self.arrived_at + message.queue_s
        self.cached_tokens = min(message.cached_tokens, len(self.spec.token_ids))

    def note_resumed(self, now: float) -> str:
        """A token of a later attempt is here: what the interruption took, in words for the log."""
        assert self.attempt is not None
        assert self.retried_at is not None
        gap_s, self.retried_at = now - self.retried_at, None
        return (
            f"attempt {self.num_attempts} resumed_s={gap_s:.4f} prefill_s={self.attempt.prefill_s:.4f} "
            f"queue_s={self.attempt.queue_s:.4f}"
        )

    def summary(self) -> RequestSummary:
        """Where the time went so far."""
        first, started, last = self.first_token_at, self.decode_started_at, self.last_token_at
        return RequestSummary(
            cached_tokens=self.cached_tokens,
            attempts=self.num_attempts,
            prefill_worker=self.last_prefill,
            decode_worker=self.last_decode,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            kv_transfer_s=0.0 if first is None or started is None else max(0.0, started - first),
            decode_s=0.0
            if started is None or last is None
            else max(0.0, last - max(started, first or started)),
            ttft_s=0.0 if first is None else first - self.arrived_at,
        )


def targets_of(slo: RequestSlo, defaults: Targets) -> Targets:
    """What a request is promised: what it asks for, else what everybody is."""
    return Targets(
        defaults.ttft_s if slo.ttft_s is None else slo.ttft_s,
        defaults.tpot_s if slo.tpot_s is None else slo.tpot_s,
        defaults.gap_s if slo.gap_s is None else slo.gap_s,
    )
