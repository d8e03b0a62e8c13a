"""The decode worker's decisions: every event in, every action out. Moves no bytes, computes nothing.

Life of a request here:

1. `Reserve`: the intake grants a lease, or the answer is `Nack`. A local one starts in the scheduler at once.
2. Its KV arrives, or its prompt is prefilled here. `Committed` tells the router that decoding goes on from
   here; after a local prefill `FirstToken` goes before it, as a prefill worker would have sent it.
3. Each step's new tokens go out as one `Tokens` per router, or `NextTokens` where a step went on and there is
   nothing but tokens to tell. `index` goes on after a preemption: no token is sent twice.
4. It ends by its own last token, or earlier by `Finish`, `Abort`, `RouterLost`, a newer attempt, a failed
   step (`AttemptFailed`) or the end of a drain. Its blocks are released in the same call, or when the
   running step or whoever may still write into them is done.

While sequences wait that were preempted, new reserves are refused: what is here comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import soonest
from cluster.engine.batch import StepOutput
from cluster.engine.sequence import Sequence
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.wire.kv_messages import (
    DecodeToPrefill,
    KvAbort,
    KvClosed,
    KvCommit,
    KvOffer,
    KvOpen,
    KvPiece,
    PrefillToDecode,
)
from cluster.wire.messages import (
    Abort,
    Committed,
    Drain,
    Drained,
    Finish,
    FirstToken,
    NackReason,
    RenewLeases,
    Reserve,
    RouterToWorker,
    TokenRow,
    Tokens,
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
    PieceScattered,
    PieceStaged,
    ReceivePosted,
    RouterLost,
    RunStep,
    ScatterFailed,
    StepDone,
    StepFailed,
    Tick,
    ToRouter,
    WriterGone,
)
from decode_worker.admission import IntakeConfig, attempt_failed, nack
from decode_worker.decode_step import Generated
from decode_worker.gauges import Gauges
from decode_worker.intake import Intake
from decode_worker.lease_table import LeaseTable
from decode_worker.scheduler import DecodeScheduler, DecodeSchedulerConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`block_bytes`: KV of one block as an edge moves it. `max_chunk_tokens`: most prompt tokens in a step;
    `targets`: of requests that bring none; `speculates`: whether rows may bring drafts; see
    `decode_worker.scheduler`."""

    block_bytes: int
    max_num_seqs: int = 64
    growth_blocks: int = 1
    max_chunk_tokens: int = 512
    max_ttl_s: float = 60.0
    retry_after_s: float = 0.25
    targets: Targets = DEFAULT_TARGETS
    speculates: bool = False


@dataclass(slots=True)
class _Drain:
    deadline: float
    announced: bool = False


class DecodeCore:
    """Implements `cluster.worker_io.WorkerCore` for the decode role. One thread calls it."""

    def __init__(self, config: DecodeConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._intake_config = IntakeConfig(
            config.block_bytes,
            config.max_num_seqs,
            config.growth_blocks,
            config.max_ttl_s,
            config.retry_after_s,
            config.targets,
        )
        self._leases = LeaseTable(self._intake_config, blocks)
        self._intake = Intake(self._intake_config, blocks, self._leases)
        self._scheduler = DecodeScheduler(
            DecodeSchedulerConfig(
                config.max_chunk_tokens, config.growth_blocks, config.targets, config.speculates
            ),
            blocks,
        )
        self._routers: set[RouterId] = set()
        self._gauges = Gauges(blocks, self._leases, self._intake, self._scheduler)
        self._drain: _Drain | None = None

    # ---- the WorkerCore interface

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; the returned actions are to be carried out in order."""
        if isinstance(event, StepDone) and event.went_on:  # nearly all events: then nothing else can be due
            step = self._scheduler.book.unsettled
            assert step is not None
            told = step.go_on(event.output, now)  # when its rows had a token last is told when the run ends
            if told is not None:
                return told
        actions = self._apply(event, now)
        for sequence in self._leases.take_started():
            self._scheduler.add(sequence)
        if not self._scheduler.book.busy:
            plan = self._scheduler.plan(now)
            if plan is not None:
                actions.append(RunStep(plan))
        if self._drain is not None:
            actions += self._announce_drained(now)
        return actions

    def next_deadline(self) -> float | None:
        return soonest(
            self._leases.next_deadline(),
            None if self._drain is None or self._drain.announced else self._drain.deadline,
        )

    def may_go_on(self) -> bool:
        return self._scheduler.may_go_on()

    def load(self) -> WorkerLoad:
        return self._gauges.load()

    def state(self) -> WorkerState:
        return WorkerState.READY if self._drain is None else WorkerState.DRAINING

    @property
    def idle(self) -> bool:
        """Nothing is here to be computed or to come, and more is welcome."""
        return (
            self._drain is None
            and self._scheduler.num_sequences == 0
            and self._leases.num_live == 0
            and not self._scheduler.book.busy
        )

    def receives_from(self, peer: Peer) -> bool:
        """Whether a lease is here that this prefill worker has opened."""
        return bool(self._leases.written_by(peer))

    def quiet(self) -> bool:
        """Nothing is held, awaited or in flight."""
        return (
            self._scheduler.num_sequences == 0
            and len(self._leases) == 0
            and not self._scheduler.book.busy
            and self._blocks.counts().used == 0
            and self.next_deadline() is None
        )

    # ---- events

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case StepDone(output, went_on):
                return self._step_done(output, now, went_on)
            case StepFailed(message):
                text = f"the step that computed this request failed: {message}"
                failed = self._scheduler.fail_step()
                return [attempt_failed(x.router, x, "step_failed", text) for x in failed]
            case FromRouter(router, message):
                return self._from_router(router, message, now)
            case FromPeer(peer, message):
                return self._from_peer(peer, message, now)
            case ReceivePosted(peer, piece):
                return self._intake.posted(peer, piece)
            case PieceStaged(peer, staged):
                return self._intake.staged(peer, staged)
            case PieceScattered(peer, piece, num_bytes):
                return self._intake.scattered(peer, piece, num_bytes, now)
            case ScatterFailed(peer, piece, reason):
                return self._intake.scatter_failed(peer, piece, reason)
            case EdgeUp(peer, in_place):
                return self._intake.edge_up(peer, in_place)
            case EdgeDown(peer):
                self._intake.edge_down(peer)
                return []
            case WriterGone(peer):
                self._intake.writer_gone(peer)
                return []
            case RouterLost(router):
                self._routers.discard(router)
                return self._end_all(router, "the router is gone", code=None)
            case Calibrated(model):
                self._scheduler.book.pacer.calibrated(model)
                return []
            case Tick():
                return self._tick(now)
            case _:
                raise AssertionError(f"not an event of a decode worker: {type(event).__name__}")

    def _from_router(self, router: RouterId, message: RouterToWorker, now: float) -> list[Action]:
        self._routers.add(router)
        match message:
            case Reserve():
                return self._reserve(router, message, now)
            case RenewLeases():
                self._leases.renew(router, message, now)
                return []
            case Finish(request=request, attempt=attempt):
                return self._end(router, request, attempt, "the request is complete")
            case Abort(request=request, attempt=attempt, reason=reason):
                return self._end(router, request, attempt, reason)
            case Drain(grace_s=grace_s):
                if self._drain is None:
                    self._drain = _Drain(now + grace_s)
                return []
            case Welcome():
                return []
            case _:
                return self._stale()

    def _from_peer(self, peer: Peer, message: PrefillToDecode | DecodeToPrefill, now: float) -> list[Action]:
        match message:
            case KvOpen() | KvOffer() | KvPiece() | KvCommit() | KvAbort() | KvClosed():
                return self._intake.from_peer(peer, message, now)
            case _:
                return self._stale()

    def _reserve(self, router: RouterId, message: Reserve, now: float) -> list[Action]:
        if self._leases.is_stale(message):
            return self._stale()
        current = self._current(message.request)
        actions: list[Action] = []
        if current is not None:
            actions += self._drop(current, "a newer attempt came")
        if self._drain is not None:
            detail = "this decode worker takes no new work"
            return [*actions, nack(router, message, self._intake_config, NackReason.DRAINING, detail)]
        return actions + self._leases.reserve(
            router,
            message,
            now,
            num_running=self._scheduler.num_sequences,
            has_preempted=self._scheduler.num_preempted > 0,
        )

    def _step_done(self, output: StepOutput, now: float, went_on: bool) -> list[Action]:
        actions: list[Action] = []
        rows: dict[RouterId, list[TokenRow]] = {}
        for new in self._scheduler.account(output, now, went_on=went_on):
            if new.token_index == 0:
                actions += self._first_token(new, now)
                continue
            one = new.sequence
            row = TokenRow(one.request, one.attempt, new.token_index, new.outputs, new.finish_reason)
            if (of_router := rows.get(one.router)) is None:
                of_router = rows[one.router] = []
            of_router.append(row)
        actions += [ToRouter(router, Tokens(rows=of_router)) for router, of_router in rows.items()]
        return actions

    def _first_token(self, new: Generated, now: float) -> list[Action]:
        """After a local prefill: what a prefill worker and the intake would have said."""
        sequence = new.sequence
        assert sequence.started_s is not None
        first = FirstToken(
            request=sequence.request,
            attempt=sequence.attempt,
            output=new.outputs[0],
            finish_reason=new.finish_reason,
            cached_tokens=sequence.num_cached,
            queue_s=sequence.started_s - sequence.accepted_s,
            prefill_s=now - sequence.started_s,
        )
        actions: list[Action] = [ToRouter(sequence.router, first)]
        if new.finish_reason is None:
            committed = Committed(
                request=sequence.request, attempt=sequence.attempt, kv_bytes=0, kv_transfer_s=0.0
            )
            actions.append(ToRouter(sequence.router, committed))
        return actions

    def _tick(self, now: float) -> list[Action]:
        actions = self._leases.expire(now)
        if self._drain is not None and now >= self._drain.deadline:
            actions += self._end_all(None, "this decode worker is leaving", code="draining")
        return actions

    # ---- ends

    def _current(self, request: RequestId) -> Sequence | None:
        """The attempt of a request that is alive here; there is at most one."""
        lease = self._leases.of_request(request)
        return lease.sequence if lease is not None else self._scheduler.get(request)

    def _end(self, router: RouterId, request: RequestId, attempt: Attempt, reason: str) -> list[Action]:
        current = self._current(request)
        if current is None or current.attempt != attempt or current.router != router:
            return self._stale()
        return self._drop(current, reason)

    def _drop(self, sequence: Sequence, reason: str) -> list[Action]:
        """The sequence is over for its router."""
        lease = self._leases.of_request(sequence.request)
        if lease is not None:
            return self._leases.end(lease, reason)
        self._scheduler.cancel(sequence)
        return []

    def _end_all(self, router: RouterId | None, reason: str, *, code: str | None) -> list[Action]:
        """Drop what a router (or every router) has here; with a `code` they are told."""
        actions: list[Action] = []
        for sequence in (*self._leases.sequences(), *self._scheduler.sequences()):
            if router is None or sequence.router == router:
                if code is not None:
                    actions.append(attempt_failed(sequence.router, sequence, code, reason))
                actions += self._drop(sequence, reason)
        return actions

    def _announce_drained(self, now: float) -> list[Action]:
        """Once nothing is left. After the grace time, blocks that a writer may still hold do not count."""
        drain = self._drain
        assert drain is not None
        held = len(self._leases) if now < drain.deadline else self._leases.num_live
        if drain.announced or self._scheduler.num_sequences or held:
            return []
        drain.announced = True
        return [ToRouter(router, Drained()) for router in sorted(self._routers)]

    def _stale(self) -> list[Action]:
        self._gauges.stale()
        return []
