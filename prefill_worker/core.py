"""The prefill worker's decisions: every event in, every action out. Owns the attempts; moves no bytes.

Life of an attempt here:

1. `Prefill` → queued in the scheduler; the edge to its decode worker is dialled unless it is up, and the
   hand-off opens the attempt there as soon as it is.
2. Steps compute the prompt in chunks; after each, the hand-off gets pieces of the finished blocks under way.
3. Token 0 goes to the router the moment it is sampled. If it ends the request there is nothing to commit.
4. The hand-off commits; D's `KvCommitted` ends the attempt. Its full blocks stay as prefix cache.
5. `Abort`, `Finish`, `RouterLost`, a lost edge, D's `KvAbort`/`KvRefused`, a deadline or a failed step end it
   earlier. It is then *over*: nothing more is computed or begun, the router is told unless it knows.
6. Its blocks are released once it is over, its hand-off is CLOSED and no step computes on them (I2, I7).

Within one edge, attempts begin pieces in order of arrival, at most `max_pieces_in_flight` at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.engine.fence import AttemptFence
from cluster.engine.prefill_order import PrefillOrder
from cluster.engine.sequence import Sequence, SequenceKey
from cluster.errors import InvalidRequest
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import TokenOutput
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    DecodeToPrefill,
    Drain,
    Drained,
    Finish,
    FirstToken,
    KvAbort,
    KvClosed,
    KvCommitted,
    KvOpened,
    KvReady,
    KvRefused,
    Prefill,
    PrefillToDecode,
    RouterToWorker,
    Welcome,
    WorkerLoad,
    WorkerState,
)
from cluster.worker_io import (
    Action,
    EdgeDown,
    EdgeUp,
    Event,
    FromPeer,
    FromRouter,
    Peer,
    PieceSent,
    RouterLost,
    RunStep,
    StepDone,
    StepFailed,
    Tick,
    ToPeer,
    ToRouter,
)
from prefill_worker.edges import EdgeBook
from prefill_worker.handoff import Handoff, HandoffConfig, HandoffState
from prefill_worker.scheduler import PrefillScheduler, PrefillSchedulerConfig

SMOOTHING = 0.2  # weight of the newest step in the smoothed rates


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`block_bytes`: KV of one block over all layers and heads of this rank."""

    block_bytes: int
    max_step_tokens: int = 512
    max_piece_bytes: int = 8 * 1024 * 1024
    max_pieces_in_flight: int = 4  # per edge
    peer_timeout_s: float = 10.0
    order: PrefillOrder = field(default_factory=PrefillOrder)


@dataclass(slots=True, eq=False)
class _Attempt:
    sequence: Sequence
    handoff: Handoff
    over: bool = False


@dataclass(slots=True)
class _Gauges:
    steps: int = 0
    stale_messages: int = 0
    prefill_tokens_per_s: float = 0.0
    kv_bytes_sent: int = 0


@dataclass(slots=True)
class _Drain:
    deadline: float
    announced: bool = False


class PrefillCore:
    """Implements `cluster.worker_io.WorkerCore` for the prefill role. One thread calls it."""

    def __init__(self, config: PrefillConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._scheduler = PrefillScheduler(
            PrefillSchedulerConfig(config.max_step_tokens, config.order), blocks
        )
        self._handoff_config = HandoffConfig(
            blocks.block_size, config.block_bytes, config.max_piece_bytes, config.peer_timeout_s
        )
        self._edges = EdgeBook()
        self._attempts: dict[SequenceKey, _Attempt] = {}
        self._newest: dict[RequestId, Attempt] = {}  # of requests that have an attempt here
        self._fence = AttemptFence()
        self._routers: set[RouterId] = set()
        self._num_accepted = 0
        self._gauges = _Gauges()
        self._drain: _Drain | None = None

    # ---- the WorkerCore interface

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; the returned actions are to be carried out in order."""
        actions = self._apply(event, now)
        actions += self._run(now)
        actions += self._pump(now)
        actions += self._announce_drained()
        return actions

    def next_deadline(self) -> float | None:
        deadlines = [a.handoff.deadline for a in self._attempts.values() if a.handoff.deadline is not None]
        redial = self._edges.next_redial()
        if redial is not None:
            deadlines.append(redial)
        if self._drain is not None and self._attempts:
            deadlines.append(self._drain.deadline)
        return min(deadlines, default=None)

    def load(self) -> WorkerLoad:
        counts = self._blocks.counts()
        return WorkerLoad(
            running=self._scheduler.num_running,
            waiting=len(self._attempts) - self._scheduler.num_running,
            queued_prefill_tokens=self._scheduler.num_queued_tokens,
            blocks_used=counts.used,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            steps=self._gauges.steps,
            stale_messages=self._gauges.stale_messages,
            prefill_tokens_per_s=self._gauges.prefill_tokens_per_s,
            kv_bytes_sent=self._gauges.kv_bytes_sent,
        )

    def state(self) -> WorkerState:
        return WorkerState.READY if self._drain is None else WorkerState.DRAINING

    def quiet(self) -> bool:
        """Nothing is held, awaited or in flight."""
        return (
            not self._attempts
            and not self._newest
            and not self._scheduler.busy
            and self._blocks.counts().used == 0
            and self.next_deadline() is None
        )

    # ---- events

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case FromRouter(router, message):
                return self._from_router(router, message, now)
            case FromPeer(peer, message):
                return self._from_peer(peer, message, now)
            case StepDone(output):
                self._gauges.steps += 1
                if output.compute_s > 0:
                    rate = self._scheduler.num_step_tokens / output.compute_s
                    old = self._gauges.prefill_tokens_per_s
                    self._gauges.prefill_tokens_per_s = old + SMOOTHING * (rate - old) if old else rate
                return self._step_done(self._scheduler.account(output), now)
            case StepFailed(message):
                self._gauges.steps += 1
                failed = [self._attempts[sequence.key] for sequence in self._scheduler.fail_step()]
                reason = f"the step that computed this prompt failed: {message}"
                return [a for x in failed for a in self._fail(x, "step_failed", reason, now)]
            case PieceSent(peer, piece, num_bytes):
                self._gauges.kv_bytes_sent += num_bytes
                attempt = self._attempt_of(peer, (piece.request, piece.attempt))
                return self._reply(attempt, lambda a: a.handoff.sent(piece, num_bytes, now))
            case EdgeUp(peer, in_place):
                self._edges.up(peer, in_place)
                return [
                    action
                    for attempt in self._on_edge(peer)
                    if attempt.handoff.state is HandoffState.DIALING
                    for action in attempt.handoff.edge_up(in_place, now)
                ]
            case EdgeDown(peer, reason):
                return self._edge_down(peer, reason, now)
            case RouterLost(router):
                self._routers.discard(router)
                lost = [a for a in self._attempts.values() if a.sequence.router == router]
                return [action for a in lost for action in self._end(a, "the router is gone", now)]
            case Tick():
                return self._tick(now)
            case _:
                raise AssertionError(f"not an event of a prefill worker: {type(event).__name__}")

    def _from_router(self, router: RouterId, message: RouterToWorker, now: float) -> list[Action]:
        self._routers.add(router)
        match message:
            case Prefill():
                return self._prefill(router, message, now)
            case Abort(request=request, attempt=number) | Finish(request=request, attempt=number):
                attempt = self._attempts.get((request, number))
                if attempt is None or attempt.over or attempt.sequence.router != router:
                    return self._stale()
                return self._end(attempt, "the request ended", now)
            case Drain(grace_s=grace_s):
                if self._drain is None:
                    self._drain = _Drain(now + grace_s)
                return []
            case Welcome():
                return []
            case _:
                return self._stale()

    def _prefill(self, router: RouterId, message: Prefill, now: float) -> list[Action]:
        if self._fence.is_stale(message.request, message.attempt):
            return self._stale()
        newest = self._newest.get(message.request)
        actions: list[Action] = []
        if newest is not None:  # the router gave the older attempt up
            old = self._attempts[message.request, newest]
            actions += self._end(old, "a newer attempt came", now)

        def refuse(code: str, reason: str, *, retryable: bool) -> list[Action]:
            failed = AttemptFailed(
                request=message.request,
                attempt=message.attempt,
                code=code,
                message=reason,
                retryable=retryable,
            )
            return [*actions, ToRouter(router, failed)]

        if self._drain is not None:
            return refuse("draining", "this prefill worker takes no new work", retryable=True)
        num_tokens, size = len(message.token_ids), self._blocks.block_size
        if not self._scheduler.can_ever_fit(num_tokens):
            pool = self._blocks.num_blocks * size
            reason = f"{num_tokens} tokens do not fit this prefill worker's KV pool of {pool} tokens"
            return refuse("too_large", reason, retryable=False)
        if not 0 <= message.skip_tokens <= num_tokens or message.skip_tokens % size:
            reason = f"skip_tokens {message.skip_tokens} is not a number of whole blocks of the prompt"
            return refuse("bad_request", reason, retryable=False)
        self._num_accepted += 1
        try:
            sequence = Sequence(
                router,
                message.request,
                message.attempt,
                message.token_ids,
                message.num_prompt_tokens,
                message.sampling,
                message.cache_salt,
                self._num_accepted,
                now,
            )
        except InvalidRequest as error:
            return refuse("bad_request", error.message, retryable=False)
        peer = Peer(message.decode_worker, message.decode_epoch)
        handoff = Handoff(self._handoff_config, sequence, peer, message.lease, message.skip_tokens, now)
        self._attempts[sequence.key] = _Attempt(sequence, handoff)
        self._newest[message.request] = message.attempt
        self._fence.take(message.request, message.attempt)
        self._scheduler.add(sequence)
        in_place = self._edges.in_place(peer)
        if in_place is None:
            return actions + self._edges.dial(peer, message.kv_address)
        return actions + handoff.edge_up(in_place, now)

    def _from_peer(self, peer: Peer, message: PrefillToDecode | DecodeToPrefill, now: float) -> list[Action]:
        match message:
            case KvOpened(request=request, attempt=number, block_ids=block_ids):
                attempt = self._attempt_of(peer, (request, number))
                actions = self._reply(attempt, lambda a: a.handoff.opened(block_ids))
                if attempt is not None and attempt.handoff.state is HandoffState.STREAMING:
                    if not attempt.handoff.target_fits:
                        reason = f"the decode worker opened {len(block_ids)} blocks: the prompt takes others"
                        return actions + self._fail(attempt, "kv_mismatch", reason, now)
                    return actions + attempt.handoff.settle(now)
                return actions
            case KvReady(request=request, attempt=number, piece=index):
                attempt = self._attempt_of(peer, (request, number))
                return self._reply(attempt, lambda a: a.handoff.ready(index, now))
            case KvCommitted(request=request, attempt=number):
                attempt = self._attempt_of(peer, (request, number))
                actions = self._reply(attempt, lambda a: a.handoff.committed())
                if attempt is not None and attempt.handoff.state is HandoffState.CLOSED:
                    actions += self._end(attempt, "committed", now)
                return actions
            case KvRefused():
                return self._refused(peer, message, now)
            case KvAbort(request=request, attempt=number, reason=reason):
                attempt = self._attempt_of(peer, (request, number))
                if attempt is None:  # it may have ended before this edge came up: D still needs to know
                    self._gauges.stale_messages += 1
                    return [ToPeer(peer, KvClosed(request=request, attempt=number))]
                message_text = f"the decode worker ended the transfer: {reason}"
                return self._fail(attempt, "kv_aborted", message_text, now, tell=False)
            case _:
                return self._stale()

    def _refused(self, peer: Peer, message: KvRefused, now: float) -> list[Action]:
        attempt = self._attempt_of(peer, (message.request, message.attempt))
        if attempt is None:
            return self._stale()
        handoff, actions = attempt.handoff, list[Action]()
        if message.piece is None:
            if handoff.state is not HandoffState.OPENING:
                return self._stale()
            actions += handoff.refused()
        else:
            if not handoff.offer_refused(message.piece):
                return self._stale()
            actions += handoff.settle(now)
        reason = f"the decode worker refused: {message.reason}"
        return actions + self._fail(attempt, "lease_lost", reason, now)

    def _step_done(self, results: list[tuple[Sequence, TokenOutput | None]], now: float) -> list[Action]:
        actions: list[Action] = []
        for sequence, token in results:
            attempt = self._attempts[sequence.key]
            if attempt.over:
                self._settle(attempt)
            elif token is not None:
                actions += self._first_token(attempt, token, now)
        return actions

    def _first_token(self, attempt: _Attempt, token: TokenOutput, now: float) -> list[Action]:
        sequence = attempt.sequence
        assert sequence.started_s is not None
        reason = sequence.finish_reason_of(token.token_id)
        first = FirstToken(
            request=sequence.request,
            attempt=sequence.attempt,
            output=token,
            finish_reason=reason,
            cached_tokens=sequence.num_cached,
            queue_s=sequence.started_s - sequence.accepted_s,
            prefill_s=now - sequence.started_s,
        )
        actions: list[Action] = [ToRouter(sequence.router, first)]
        if reason is not None:
            return actions + self._end(attempt, "token 0 ended the request", now)
        return actions + attempt.handoff.sampled(token, now)

    def _edge_down(self, peer: Peer, reason: str, now: float) -> list[Action]:
        on_edge = self._on_edge(peer)
        left_open = any(attempt.handoff.may_write for attempt in on_edge)
        self._edges.down(peer, now, redial=left_open)
        actions: list[Action] = []
        for attempt in on_edge:
            attempt.handoff.edge_down()
            message = f"the KV edge to {peer.worker} broke: {reason}"
            actions += self._fail(attempt, "edge_lost", message, now)
        return actions

    def _tick(self, now: float) -> list[Action]:
        actions = self._edges.redial(now)
        if self._drain is not None and now >= self._drain.deadline:
            for attempt in list(self._attempts.values()):
                actions += self._fail(attempt, "draining", "this prefill worker is leaving", now)
        for attempt in list(self._attempts.values()):
            handoff = attempt.handoff
            if handoff.deadline is None or now < handoff.deadline:
                continue
            if attempt.over:
                actions += handoff.unresponsive()
            else:
                message = f"no answer from {handoff.peer.worker} while {handoff.state.name}"
                actions += self._fail(attempt, "peer_silent", message, now)
        return actions

    # ---- ends

    def _fail(
        self, attempt: _Attempt, code: str, message: str, now: float, *, tell: bool = True
    ) -> list[Action]:
        """End an attempt that the router believes in; it may be tried elsewhere. `tell`: D too."""
        actions: list[Action] = []
        if not attempt.over:
            request, number = attempt.sequence.key
            failed = AttemptFailed(
                request=request, attempt=number, code=code, message=message, retryable=True
            )
            actions.append(ToRouter(attempt.sequence.router, failed))
        return actions + self._end(attempt, message, now, tell=tell)

    def _end(self, attempt: _Attempt, reason: str, now: float, *, tell: bool = True) -> list[Action]:
        attempt.over = True
        self._scheduler.remove(attempt.sequence)
        actions = attempt.handoff.stop(reason, now, tell=tell)
        self._settle(attempt)
        return actions

    def _settle(self, attempt: _Attempt) -> None:
        """Phase two: release the blocks if nothing touches them any more."""
        sequence = attempt.sequence
        closed = attempt.handoff.state is HandoffState.CLOSED
        if not attempt.over or not closed or self._scheduler.in_step(sequence):
            return
        if self._attempts.pop(sequence.key, None) is None:
            return
        if self._newest.get(sequence.request) == sequence.attempt:
            del self._newest[sequence.request]
        sequence.release(self._blocks)

    # ---- what follows every event

    def _run(self, now: float) -> list[Action]:
        if self._scheduler.busy:
            return []
        plan = self._scheduler.plan(now)
        return [] if plan is None else [RunStep(plan)]

    def _pump(self, now: float) -> list[Action]:
        """Begin pieces on every edge that has room, attempts in order of arrival."""
        actions: list[Action] = []
        in_flight: dict[Peer, int] = {}
        for attempt in self._attempts.values():
            peer, num = attempt.handoff.peer, attempt.handoff.num_in_flight
            in_flight[peer] = in_flight.get(peer, 0) + num
        for attempt in self._attempts.values():
            handoff = attempt.handoff
            while in_flight[handoff.peer] < self._config.max_pieces_in_flight:
                begun = handoff.next_piece(now)
                if not begun:
                    break
                in_flight[handoff.peer] += 1
                actions += begun
        return actions

    def _announce_drained(self) -> list[Action]:
        if self._drain is None or self._drain.announced or self._attempts:
            return []
        self._drain.announced = True
        return [ToRouter(router, Drained()) for router in sorted(self._routers)]

    # ---- helpers

    def _on_edge(self, peer: Peer) -> list[_Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.handoff.peer == peer]

    def _attempt_of(self, peer: Peer, key: SequenceKey) -> _Attempt | None:
        attempt = self._attempts.get(key)
        return attempt if attempt is not None and attempt.handoff.peer == peer else None

    def _reply(
        self, attempt: _Attempt | None, move: Callable[[_Attempt], list[Action] | None]
    ) -> list[Action]:
        """Apply a hand-off move; what the hand-off does not expect is stale."""
        actions = move(attempt) if attempt is not None else None
        if attempt is None or actions is None:
            return self._stale()
        self._settle(attempt)
        return actions

    def _stale(self) -> list[Action]:
        self._gauges.stale_messages += 1
        return []
