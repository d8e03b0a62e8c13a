"""The prefill worker's decisions: every event in, every action out. Owns the attempts; moves no bytes.

Life of an attempt here:

1. `Prefill` → queued in the scheduler; the edge to its decode worker is dialled unless it is up, and the
   hand-off opens the attempt there as soon as it is. While nothing is here, edges are dialled beforehand.
2. Steps compute the prompt in chunks; after each, the hand-off gets pieces of the finished blocks under way.
3. Token 0 goes to the router the moment it is sampled. If it ends the request there is nothing to commit.
4. The hand-off commits; D's `KvCommitted` ends the attempt. Its full blocks stay as prefix cache.
5. `Abort`, `Finish`, `RouterLost`, a lost edge, D's `KvAbort`/`KvRefused`, a deadline or a failed step end it
   earlier. It is then *over*: nothing more is computed or begun, the router is told unless it knows.
6. Its blocks are released once it is over, its hand-off is CLOSED and no step computes on them (I2, I7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from cluster.clock import soonest
from cluster.engine.fence import AttemptFence
from cluster.engine.rate_meter import RateMeter
from cluster.engine.sequence import Sequence
from cluster.ids import RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import TokenOutput
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Drain,
    Drained,
    Finish,
    FirstToken,
    Partners,
    Prefill,
    RouterToWorker,
    Welcome,
    WorkerLoad,
    WorkerState,
)
from cluster.worker_io import (
    Action,
    Calibrated,
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
    ToRouter,
)
from prefill_worker.attempts import AttemptTable, PrefillAttempt, Refusal, admit
from prefill_worker.handoff import Handoff, HandoffConfig
from prefill_worker.scheduler import PrefillScheduler, PrefillSchedulerConfig
from prefill_worker.transfers import Transfers
from prefill_worker.warming import Warming

_NOBODY: Final = WorkerId("")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`block_bytes`: KV of one block over all layers and heads of this rank. `max_step_tokens`, and `targets`
    of requests that bring none: see `prefill_worker.scheduler`. `worker`: this one's name, for
    `prefill_worker.warming`."""

    block_bytes: int
    max_step_tokens: int = 512
    max_piece_bytes: int = 8 * 1024 * 1024
    max_pieces_in_flight: int = 4  # per edge
    worker: WorkerId = _NOBODY
    warm_edges: int = 0  # made before requests need them, at most
    peer_timeout_s: float = 10.0
    targets: Targets = DEFAULT_TARGETS


@dataclass(slots=True)
class _Gauges:
    steps: int = 0
    borrowed_pieces: int = 0
    stale_messages: int = 0
    prefill_rate: RateMeter = field(default_factory=RateMeter)


@dataclass(slots=True)
class _Drain:
    deadline: float
    expired: bool = False
    announced: bool = False


class PrefillCore:
    """Implements `cluster.worker_io.WorkerCore` for the prefill role. One thread calls it."""

    def __init__(self, config: PrefillConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._scheduler = PrefillScheduler(
            PrefillSchedulerConfig(config.max_step_tokens, config.targets), blocks
        )
        self._handoff_config = HandoffConfig(
            blocks.block_size, config.block_bytes, config.max_piece_bytes, config.peer_timeout_s
        )
        self._attempts = AttemptTable(blocks, self._scheduler)
        self._warming = Warming(config.worker, config.warm_edges)
        self._transfers = Transfers(self._attempts, self._warming)
        self._fence = AttemptFence()
        self._routers: set[RouterId] = set()
        self._num_accepted = 0
        self._gauges = _Gauges()
        self._drain: _Drain | None = None

    # ---- the WorkerCore interface

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; the returned actions are to be carried out in order."""
        actions = self._apply(event, now)
        if not self._scheduler.busy:
            plan = self._scheduler.plan(now)
            if plan is not None:
                actions.append(RunStep(plan))
        actions += self._attempts.begin_pieces(self._config.max_pieces_in_flight, now)
        if self._drain is not None:
            actions += self._announce_drained(self._drain)
        if self._is_idle:
            actions += self._transfers.warm_up(now)
        self._transfers.note_sent(actions)
        return actions

    def next_deadline(self) -> float | None:
        due = soonest(self._work_due(), self._transfers.next_better())
        return soonest(due, self._transfers.next_warm_up()) if self._is_idle else due

    def _work_due(self) -> float | None:
        drain = self._drain
        is_draining = drain is not None and not drain.expired and self._attempts
        return soonest(self._transfers.next_deadline(), drain.deadline if drain and is_draining else None)

    @property
    def _is_idle(self) -> bool:
        return not self._attempts and not self._scheduler.busy and self._drain is None

    def may_go_on(self) -> bool:
        """No row is in two steps without a decision between."""
        return False

    def load(self) -> WorkerLoad:
        counts = self._blocks.counts()
        load = WorkerLoad(
            running=self._scheduler.num_running,
            waiting=len(self._attempts) - self._scheduler.num_running,
            queued_prefill_tokens=self._scheduler.num_queued_tokens,
            blocks_used=counts.used,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            steps=self._gauges.steps,
            borrowed_pieces=self._gauges.borrowed_pieces,
            stale_messages=self._gauges.stale_messages + self._transfers.num_stale,
            prefill_tokens_per_s=self._gauges.prefill_rate.tokens_per_s,
            kv_bytes_sent=self._transfers.num_bytes,
        )
        return self._scheduler.pacer.gauges(load)

    def state(self) -> WorkerState:
        return WorkerState.READY if self._drain is None else WorkerState.DRAINING

    def quiet(self) -> bool:
        """Nothing is held, awaited or in flight."""
        return (
            not self._attempts
            and not self._scheduler.busy
            and self._blocks.counts().used == 0
            and self._work_due() is None
        )

    # ---- events

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case FromRouter(router, message):
                return self._from_router(router, message, now)
            case FromPeer(peer, message):
                return self._transfers.from_peer(peer, message, now)
            case StepDone(output):
                self._gauges.steps += 1
                self._gauges.borrowed_pieces += output.num_borrowed
                self._gauges.prefill_rate.add(self._scheduler.num_step_tokens, output.compute_s)
                return self._step_done(self._scheduler.account(output, now), now)
            case StepFailed(message):
                self._gauges.steps += 1
                failed = [self._attempts.get(x.key) for x in self._scheduler.fail_step()]
                reason = f"the step that computed this prompt failed: {message}"
                return [
                    a
                    for x in failed
                    if x is not None
                    for a in self._attempts.fail(x, "step_failed", reason, now)
                ]
            case PieceSent(peer, piece, num_bytes):
                return self._transfers.sent(peer, piece, num_bytes, now)
            case EdgeUp():
                return self._transfers.edge_up(event, now)
            case EdgeDown():
                return self._transfers.edge_down(event, now)
            case RouterLost(router):
                self._routers.discard(router)
                self._warming.router_lost(router)
                lost = [a for a in self._attempts if a.sequence.router == router]
                return [action for a in lost for action in self._attempts.end(a, "the router is gone", now)]
            case Calibrated(model):
                self._scheduler.pacer.calibrated(model)
                return []
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
                return self._attempts.end(attempt, "the request ended", now)
            case Drain(grace_s=grace_s):
                if self._drain is None:
                    self._drain = _Drain(now + grace_s)
                return []
            case Welcome():
                return []
            case Partners():
                self._warming.told(router, message)
                return []
            case _:
                return self._stale()

    def _prefill(self, router: RouterId, message: Prefill, now: float) -> list[Action]:
        if self._fence.is_stale(message.request, message.attempt):
            return self._stale()
        actions: list[Action] = []
        older = self._attempts.newest(message.request)
        if older is not None:  # its router has given it up
            actions += self._attempts.end(older, "a newer attempt came", now)
        admitted: Sequence | Refusal
        if self._drain is not None:
            admitted = Refusal("draining", "this prefill worker takes no new work")
        else:
            self._num_accepted += 1
            admitted = admit(router, message, self._blocks, self._config.targets, self._num_accepted, now)
        if isinstance(admitted, Refusal):
            failed = AttemptFailed(
                request=message.request,
                attempt=message.attempt,
                code=admitted.code,
                message=admitted.message,
                retryable=admitted.code == "draining",
            )
            return [*actions, ToRouter(router, failed)]
        peer = Peer(message.decode_worker, message.decode_epoch)
        handoff = Handoff(self._handoff_config, admitted, peer, message.lease, message.skip_tokens, now)
        attempt = PrefillAttempt(admitted, handoff)
        self._attempts.add(attempt)
        self._fence.take(message.request, message.attempt)
        self._scheduler.add(admitted)
        return actions + self._transfers.dial_for(attempt, message.kv_address, now)

    def _step_done(self, results: list[tuple[Sequence, TokenOutput | None]], now: float) -> list[Action]:
        actions: list[Action] = []
        for sequence, token in results:
            attempt = self._attempts.get(sequence.key)
            assert attempt is not None, "settled during its step"
            if attempt.over:
                self._attempts.settle(attempt)
            elif token is not None:
                actions += self._first_token(attempt, token, now)
        return actions

    def _first_token(self, attempt: PrefillAttempt, token: TokenOutput, now: float) -> list[Action]:
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
            return actions + self._attempts.end(attempt, "token 0 ended the request", now)
        alone = msgspec.structs.replace(token, prompt_scores=())  # they are with the router
        return actions + attempt.handoff.sampled(alone, now)

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        drain = self._drain
        if drain is not None and not drain.expired and now >= drain.deadline:
            drain.expired = True
            for attempt in self._attempts:
                actions += self._attempts.fail(attempt, "draining", "this prefill worker is leaving", now)
        return actions + self._transfers.tick(now)

    def _announce_drained(self, drain: _Drain) -> list[Action]:
        if drain.announced or self._attempts:
            return []
        drain.announced = True
        return [ToRouter(router, Drained()) for router in sorted(self._routers)]

    def _stale(self) -> list[Action]:
        self._gauges.stale_messages += 1
        return []
