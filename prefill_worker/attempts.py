"""The attempts of a prefill worker: which are here, on whose edge, and when their blocks may go.

1. `admit` turns a router's `Prefill` into a sequence, or says why it cannot be computed here.
2. The core adds the attempt; it is found by key, by edge, by router, or as the newest of its request.
3. `begin_pieces` starts transfers: within one edge in order of arrival, at most so many at a time.
4. `end` (or `fail`, which tells the router) makes it over: nothing more is computed or begun.
5. `settle` removes it and releases its blocks, once its hand-off is closed and no step computes on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cluster.engine.pace import pace_of
from cluster.engine.sequence import Sequence, SequenceKey, num_blocks_for
from cluster.errors import InvalidRequest
from cluster.ids import RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.slo_classes import Targets
from cluster.wire.messages import AttemptFailed, Prefill
from cluster.worker_io import Action, Peer, ToRouter
from prefill_worker.handoff import Handoff, HandoffState
from prefill_worker.scheduler import PrefillScheduler


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a prompt is not computed here, for `AttemptFailed`."""

    code: str
    message: str


def admit(
    router: RouterId, message: Prefill, blocks: BlockManager, targets: Targets, order: int, now: float
) -> Sequence | Refusal:
    """The sequence of a `Prefill` that can be computed here, sooner or later. `targets`: of requests that
    bring none."""
    num_tokens, size = len(message.token_ids), blocks.block_size
    if num_blocks_for(num_tokens, size) > blocks.num_blocks:
        pool = blocks.num_blocks * size
        return Refusal(
            "too_large", f"{num_tokens} tokens do not fit this prefill worker's KV pool of {pool} tokens"
        )
    if not 0 <= message.skip_tokens <= num_tokens or message.skip_tokens % size:
        return Refusal(
            "bad_request", f"skip_tokens {message.skip_tokens} is not whole blocks of {num_tokens} tokens"
        )
    try:
        return Sequence(
            router,
            message.request,
            message.attempt,
            message.token_ids,
            message.num_prompt_tokens,
            message.sampling,
            message.cache_salt,
            order,
            now,
            pace_of(message.slo, targets, now),
        )
    except InvalidRequest as error:
        return Refusal("bad_request", error.message)


class PrefillAttempt(msgspec.Struct, eq=False):
    """`over`: nothing more is computed or begun, and the router knows."""

    sequence: Sequence
    handoff: Handoff
    over: bool = False


class AttemptTable:
    """Owns the attempts; iterating is in order of arrival and safe against removal."""

    def __init__(self, blocks: BlockManager, scheduler: PrefillScheduler) -> None:
        self._blocks = blocks
        self._scheduler = scheduler
        self._attempts: dict[SequenceKey, PrefillAttempt] = {}
        self._newest: dict[RequestId, PrefillAttempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[PrefillAttempt]:
        return iter(tuple(self._attempts.values()))

    def add(self, attempt: PrefillAttempt) -> None:
        self._attempts[attempt.sequence.key] = attempt
        self._newest[attempt.sequence.request] = attempt

    def get(self, key: SequenceKey) -> PrefillAttempt | None:
        return self._attempts.get(key)

    def newest(self, request: RequestId) -> PrefillAttempt | None:
        """The latest attempt at a request, if it is here."""
        return self._newest.get(request)

    def with_peer(self, peer: Peer, key: SequenceKey) -> PrefillAttempt | None:
        """The attempt, if that peer is its decode worker."""
        attempt = self._attempts.get(key)
        return attempt if attempt is not None and attempt.handoff.peer == peer else None

    def on_edge(self, peer: Peer) -> list[PrefillAttempt]:
        return [attempt for attempt in self._attempts.values() if attempt.handoff.peer == peer]

    def next_deadline(self) -> float | None:
        deadlines = [attempt.handoff.deadline for attempt in self._attempts.values()]
        times = [deadline for deadline in deadlines if deadline is not None]
        return min(times) if times else None

    def begin_pieces(self, max_in_flight: int, now: float) -> list[Action]:
        """Begin pieces on every edge that has fewer than `max_in_flight` under way."""
        waiting = [attempt.handoff for attempt in self._attempts.values() if attempt.handoff.has_piece()]
        if not waiting:
            return []
        actions: list[Action] = []
        in_flight: dict[Peer, int] = {}
        for attempt in self._attempts.values():
            handoff = attempt.handoff
            in_flight[handoff.peer] = in_flight.get(handoff.peer, 0) + handoff.num_in_flight
        for handoff in waiting:
            under_way = in_flight[handoff.peer]
            while under_way < max_in_flight and (begun := handoff.next_piece(now)):
                under_way = in_flight[handoff.peer] = under_way + 1
                actions += begun
        return actions

    def fail(
        self, attempt: PrefillAttempt, code: str, message: str, now: float, *, tell: bool = True
    ) -> list[Action]:
        """End an attempt that its router still believes in; it may be tried elsewhere. `tell`: D too."""
        actions: list[Action] = []
        if not attempt.over:
            request, number = attempt.sequence.key
            failed = AttemptFailed(
                request=request, attempt=number, code=code, message=message, retryable=True
            )
            actions.append(ToRouter(attempt.sequence.router, failed))
        return actions + self.end(attempt, message, now, tell=tell)

    def end(self, attempt: PrefillAttempt, reason: str, now: float, *, tell: bool = True) -> list[Action]:
        """The attempt is over for its router. Its blocks follow as soon as nothing touches them."""
        attempt.over = True
        self._scheduler.remove(attempt.sequence)
        actions = attempt.handoff.stop(reason, now, tell=tell)
        self.settle(attempt)
        return actions

    def settle(self, attempt: PrefillAttempt) -> None:
        """Phase two of every end: nothing touches the blocks any more, so they are released."""
        sequence = attempt.sequence
        if not attempt.over or attempt.handoff.state is not HandoffState.CLOSED:
            return
        if self._scheduler.in_step(sequence) or self._attempts.pop(sequence.key, None) is None:
            return
        if self._newest.get(sequence.request) is attempt:  # a newer one may have come, and gone before it
            del self._newest[sequence.request]
        sequence.release(self._blocks)
