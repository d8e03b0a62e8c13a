"""The conductor: decides every accepted request's fate, from arrival to its last token. Sans-IO.

Life of a request (`handle` is called with each event, in the order they happened):

1. `Submitted`: place it (`router.policy`), or queue it, or refuse it. QUEUED; RESERVE goes to D.
2. `Grant`: RESERVED, then PREFILL goes to P with D's lease (or D prefills itself): PREFILLING.
   `Nack`: the next candidate, the queue, or the refusal that no worker could ever hold it.
3. `FirstToken`: delivered at once; STREAMING_KV (DECODING when local). If it ends the request, D's lease is
   given up.
4. `Committed`: DECODING; P is done with it.
5. `Tokens`: delivered in order, each index once; with the finish reason DONE.
6. The client finishes or leaves: FINISH or ABORT to every holder, nothing remains here.
7. A worker is lost, an attempt fails, a wait ends: RETRY. The holders that live are told, and attempt + 1
   is placed elsewhere with the prompt *and the tokens already delivered* as its input: the same bits go on at
   the next index. When nothing can serve it, it waits for a worker to come back, then the client gets the
   cause. At most `max_attempts` are tried; one that a draining worker handed over does not count.

Every wait has its end (`ConductorConfig`):

    QUEUED, no place       queue_timeout_s, or at once if no place is expected by then → Overloaded
    QUEUED, first token    further away than max_backlog_s, predicted     → Overloaded, at once
    QUEUED, nobody there   recovery_wait_s; also after a loss             → NotReady, or the loss
    QUEUED, RESERVE sent   reserve_timeout_s                              → retry, D avoided
    PREFILLING             prefill_timeout_s + 4 x the predicted TTFT     → retry, P avoided
    committed, no token 0  first_token_timeout_s                          → retry, P avoided
    STREAMING_KV           commit_timeout_s                               → retry, P avoided
    DECODING               decode_silence_s without a token               → retry, D avoided
    any                    the request's own deadline                     → DeadlineExceeded

These are the last resort: a dead worker's stream breaks in milliseconds (`WorkerGone`), a hung process misses
heartbeats, a hung engine does not step (`WorkerBook`). Leases are renewed per D at a third of their time.

Stale, duplicate and unknown messages are dropped and counted, by what made them so (`StaleReason`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.block_hash import hash_blocks
from cluster.errors import BatonError, DeadlineExceeded
from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec, RequestState
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.kv_events import KvEvents, KvResync, WorkerSays
from cluster.wire.messages import (
    Drained,
    Heartbeat,
    Refused,
    Register,
    RenewLeases,
    Tokens,
    WorkerLoad,
    WorkerState,
)
from router.admission import AdmissionQueue
from router.affinity import Affinity, Near
from router.attempt import LiveRequest, targets_of
from router.conductor_io import (
    Action,
    ClientFinished,
    ClientLeft,
    Deliver,
    Ended,
    Event,
    FromWorker,
    Lifecycle,
    Send,
    Submitted,
    Tick,
    WorkerGone,
    WorkerJoined,
)
from router.config import ConductorConfig
from router.deadlines import Deadlines
from router.delivery import Failed, RequestSummary, StaleReason
from router.fair_lines import Turn
from router.legs import AttemptMessage, Broken, Legs, NotTaken, Progress
from router.outcome import rejection, worker_lost
from router.output_lengths import OutputLengths
from router.placement_stats import PlacementStats
from router.policy import Elastic, Placement, PlacementPolicy, PlacementRequest, Reject, RejectReason
from router.worker_book import WorkerBook

_S = RequestState
_E = LifecycleEvent


class Conductor:
    """Single owner of all requests of this router. Not thread-safe; events are handled one at a time.

    Raises (from `handle`):
        IllegalTransition: a bug of ours; the state of the conductor cannot be trusted any more.
    """

    def __init__(self, config: ConductorConfig, policy: PlacementPolicy | None = None) -> None:
        self._config = config
        self._policy = policy or Elastic(config.policy, config.slo)
        self._lengths = OutputLengths()
        self._requests: dict[RequestId, LiveRequest] = {}
        self._affinity = Affinity()
        self._queue = AdmissionQueue(config.max_queued, config.max_overtake_s)
        self._deadlines: Deadlines[RequestId] = Deadlines()
        self._num_submitted = 0
        self._has_room = False  # something happened that may let a queued request be placed
        self._actions: list[Action] = []
        self.workers = WorkerBook(config.stall_timeout_s, config.policy)
        self._legs = Legs(config, self.workers, self._emit)
        self._stale = dict.fromkeys(StaleReason, 0)

    # ---- the seam

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, in order. `now` never goes back."""
        match event:
            case FromWorker(worker, epoch, message):
                if self.workers.epoch(worker) != epoch:
                    self._stale[StaleReason.EPOCH] += 1
                else:
                    self._on_message(worker, message, now)
            case Submitted(spec):
                self._on_submitted(spec, now)
            case ClientFinished(request):
                if (live := self._requests.get(request)) is not None:
                    self._finish(live, now)
            case ClientLeft(request, reason):
                if (live := self._requests.get(request)) is not None:
                    self._abort(live, reason, now)
            case WorkerJoined(register):
                self._on_joined(register, now)
            case WorkerGone(worker, gone_epoch, reason):
                self._on_gone(worker, gone_epoch, reason, now)
            case Tick():
                self._on_tick(now)
        if self._has_room:
            self._drain_queue(now)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None if nothing waits."""
        times = [at for at in (self._deadlines.next(), self._legs.leases.next_renewal()) if at is not None]
        return min(times, default=None)

    def may_be_due_before(self, at: float) -> bool:
        """Whether `next_deadline()` can be sooner than `at`: cheap enough for every event."""
        return self._deadlines.may_end_before(at) or self._legs.leases.may_be_due_before(at)

    def quiet(self) -> bool:
        """Whether nothing of any request is left in here."""
        return not (
            self._requests
            or len(self._queue)
            or len(self._deadlines)
            or len(self._legs.leases)
            or self.workers.in_flight()
        )

    def summary(self, request: RequestId) -> RequestSummary | None:
        """Where the time of a live request went so far."""
        live = self._requests.get(request)
        return None if live is None else live.summary()

    def state(self, request: RequestId) -> RequestState | None:
        live = self._requests.get(request)
        return None if live is None else live.state

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def stale_messages(self) -> dict[StaleReason, int]:
        """Messages dropped so far."""
        return dict(self._stale)

    @property
    def num_stale_messages(self) -> int:
        return sum(self._stale.values())

    @property
    def placement_stats(self) -> PlacementStats:
        """Counts so far; they go on growing."""
        return self._legs.stats

    @property
    def num_queued(self) -> int:
        """Requests accepted and not yet sent to any worker."""
        return len(self._queue)

    # ---- arrival, placement, queue

    def _on_submitted(self, spec: RequestSpec, now: float) -> None:
        assert spec.request not in self._requests, f"request id used twice: {spec.request}"
        self._num_submitted += 1
        live = LiveRequest(
            spec=spec,
            arrived_at=now,
            deadline_at=None if spec.deadline_s is None else now + spec.deadline_s,
            order=(spec.priority << 48) + self._num_submitted,
            targets=targets_of(spec.slo, self._config.slo),
            wait_until=now + self._config.queue_timeout_s,
        )
        self._requests[spec.request] = live
        self._record(live, _E.ARRIVED, now)
        if not self._queue.may_pass(now):
            self._enqueue(live, now)
        else:
            self._place(live, now)

    def _place(self, live: LiveRequest, now: float) -> RejectReason | None:
        """Reserve for a request in QUEUED, or queue it, or fail it. Returns why it has to wait, if it has."""
        register = self.workers.any_register()
        if register is not None and not live.hashes:
            block_size, salt = register.geometry.block_size, live.spec.cache_salt
            live.hashes = tuple(hash_blocks(live.spec.token_ids, block_size, register.fingerprint, salt))
        decision = self._policy.place(self.workers.view(), self._placement_request(live, now), now)
        if isinstance(decision, Placement):
            self._queue.placed(live.request, self._turn(live))
            near = Near(decision.prefill or decision.decode, decision.decode)
            self._affinity.note(live.spec.tenant, live.spec.affinity, near)
            self._wait(live, now + self._legs.reserve(live, decision, now).wait_s)
            return None
        if decision.reason is RejectReason.NO_WORKER and not live.is_recovering:
            live.is_recovering = True
            live.wait_until = now + self._config.recovery_wait_s
        is_final = decision.reason in (RejectReason.TOO_LARGE, RejectReason.BACKLOG)
        if not is_final and now < live.wait_until:
            self._enqueue(live, now)
            return decision.reason
        self._reject(live, decision, now)
        return None

    def _placement_request(self, live: LiveRequest, now: float) -> PlacementRequest:
        expected = self._lengths.expect(len(live.spec.token_ids))
        near = self._affinity.of(live.spec.tenant, live.spec.affinity)
        return live.placement_request(expected, self._config.max_backlog_s, now, near)

    def _reject(self, live: LiveRequest, reject: Reject, now: float) -> None:
        """It finds no place. One that had one is told why it lost that."""
        if live.cause is None:
            self._legs.stats.rejected(reject.reason.value)
        retry_after_s = max(self._queue.retry_after_s(now, live.spec.tenant), live.retry_after_s)
        self._fail(live, live.cause or rejection(reject, live.spec, retry_after_s), now)

    def _enqueue(self, live: LiveRequest, now: float) -> None:
        if live.request in self._queue:
            self._wait(live, live.wait_until)
            return
        if live.cause is None:  # those that had a place go before newcomers
            wait_s = None if live.is_recovering else self._queue.expected_wait_s(now, live.spec.tenant)
            late_s = 0.0 if wait_s is None else wait_s - (live.wait_until - now)
            if late_s > 0:
                self._reject(live, Reject(RejectReason.QUEUE_TOO_SLOW, retry_after_s=late_s), now)
                return
            if self._queue.is_full:
                displaced = self._queue.displaced_by(live.spec.tenant, live.spec.share)
                refused = live if displaced is None else self._requests[displaced]
                self._reject(refused, Reject(RejectReason.QUEUE_FULL), now)
                if displaced is None:
                    return
        self._queue.add(live.request, live.order, now, self._turn(live))
        self._wait(live, live.wait_until)

    def _turn(self, live: LiveRequest) -> Turn:
        """Whose turn it takes, and how much of it: nothing the second time."""
        spec = live.spec
        output = min(spec.sampling.max_tokens, self._lengths.expect(len(spec.token_ids)))
        work = len(spec.token_ids) + output if live.num_reserves == 0 else 0.0
        return Turn(spec.tenant, spec.share, work)

    def _drain_queue(self, now: float) -> None:
        """Place those that wait, each tenant in its turn; see `router.admission` for who may pass whom. One
        that is as large as one that has just found no room is not tried."""
        self._has_room = False
        too_large: LiveRequest | None = None
        for request in self._queue.candidates():
            live = self._requests[request]
            if too_large is not None and live.is_as_large_as(too_large):
                continue
            reason = self._place(live, now)
            if reason is RejectReason.BUSY:
                too_large = live
            if reason is not None and self._queue.is_overdue(request, now):
                break

    # ---- what workers say

    def _on_message(self, worker: WorkerId, message: WorkerSays, now: float) -> None:
        match message:
            case Tokens(rows=rows):
                for row in rows:
                    self._take(worker, row, now)
            case Heartbeat(state=state, load=load):
                self._on_heartbeat(worker, state, load, now)
            case KvEvents():
                if not self.workers.cache_changed(worker, message):
                    self._emit(Send(worker, KvResync()))
            case Register() | Drained() | Refused():
                pass  # membership is the driver's
            case _:
                self._take(worker, message, now)

    def _take(self, worker: WorkerId, message: AttemptMessage, now: float) -> None:
        """A message about an attempt, and what becomes of its request."""
        live = self._requests.get(message.request)
        verdict = None if live is None else self._legs.take(worker, live, message, now)
        if live is None or verdict is None:
            self._stale[StaleReason.REQUEST if live is None else StaleReason.ATTEMPT] += 1
            return
        match verdict:
            case Progress(wait_s, outputs, finish):
                self._wait(live, now + wait_s)
                if outputs:
                    self._deliver(live, outputs, finish, now)
            case NotTaken():
                self._place(live, now)
            case Broken(cause, culprit, detail, retryable=True):
                self._retry(live, cause, {culprit}, detail, now, counts=not verdict.handed_over)
            case Broken(cause, _, detail):
                self._fail(live, cause, now, detail)

    def _deliver(
        self, live: LiveRequest, outputs: Sequence[TokenOutput], finish: FinishReason | None, now: float
    ) -> None:
        if live.retried_at is not None:
            self._record(live, _E.RESUMED, now, live.note_resumed(now))
        delivery = live.take_tokens(outputs, finish, now)
        self._emit(Deliver(live.request, delivery))
        if delivery.finish_reason is not None:
            self._record(live, _E.LAST_TOKEN, now)
            self._finish(live, now)

    def _on_heartbeat(self, worker: WorkerId, state: WorkerState, load: WorkerLoad, now: float) -> None:
        self._has_room = True
        if self.workers.heartbeat(worker, state, load, now):
            for request in self.workers.in_flight_of(worker):
                self._retry(
                    self._requests[request], worker_lost(), set(), f"{worker}: its engine is stuck", now
                )

    # ---- trouble

    def _on_joined(self, register: Register, now: float) -> None:
        known = self.workers.epoch(register.worker)
        if known is not None:
            self._on_gone(register.worker, known, f"replaced by epoch {register.epoch}", now)
        self.workers.join(register, now)

    def _on_gone(self, worker: WorkerId, epoch: Epoch, reason: str, now: float) -> None:
        if self.workers.epoch(worker) != epoch:
            self._stale[StaleReason.EPOCH] += 1
            return
        requests = self.workers.leave(worker)
        self._legs.leases.leave(worker)
        for request in requests:
            self._retry(self._requests[request], worker_lost(), set(), f"{worker}: {reason}", now)
        self._has_room = True  # those that wait for this worker alone must hear of it

    def _on_tick(self, now: float) -> None:
        for request in self._deadlines.pop_due(now):
            self._on_deadline(self._requests[request], now)
        for worker, leases in self._legs.leases.pop_due(now):
            self._emit(Send(worker, RenewLeases(leases=leases)))

    def _on_deadline(self, live: LiveRequest, now: float) -> None:
        attempt = live.attempt
        if live.deadline_at is not None and now >= live.deadline_at:
            self._fail(live, DeadlineExceeded("The request's deadline passed."), now)
        elif attempt is None:
            self._place(live, now)  # its wait is over: now or never
        else:
            broken = self._legs.overdue(live, attempt)
            self._retry(live, broken.cause, {broken.culprit}, broken.detail, now)

    def _retry(
        self,
        live: LiveRequest,
        cause: BatonError,
        avoid: set[WorkerId],
        detail: str,
        now: float,
        *,
        counts: bool = True,
    ) -> None:
        """End the attempt and place the next one, if there may be one; else the client gets `cause`. One that
        a draining worker handed over does not count as failed."""
        live.num_failed += counts
        if live.num_failed >= self._config.max_attempts:
            self._fail(live, cause, now, detail)
            return
        self._legs.let_go(live, detail)
        self._has_room = True
        live.move(_S.RETRY)
        self._record(live, _E.RETRIED, now, detail)
        live.cause = cause
        live.avoid |= avoid
        live.num_attempts += 1
        live.is_recovering = True
        live.retried_at = now if live.retried_at is None else live.retried_at
        live.wait_until = now + self._config.recovery_wait_s
        live.move(_S.QUEUED)
        self._place(live, now)

    # ---- the end

    def _finish(self, live: LiveRequest, now: float) -> None:
        self._lengths.add(len(live.spec.token_ids), len(live.output_ids))
        self._close(live, _S.DONE, _E.FINISHED, None, now)

    def _abort(self, live: LiveRequest, reason: str, now: float) -> None:
        self._close(live, _S.ABORTED, _E.ABORTED, reason, now)

    def _fail(self, live: LiveRequest, error: BatonError, now: float, detail: str = "") -> None:
        self._emit(Deliver(live.request, Failed(error)))
        self._close(live, _S.ABORTED, _E.FAILED, detail or str(error), now)

    def _close(
        self, live: LiveRequest, state: RequestState, event: LifecycleEvent, reason: str | None, now: float
    ) -> None:
        """Tell the holders (ABORT, or FINISH without a reason) and forget the request."""
        if live.attempt is not None:
            self._queue.departed(now)
            self._has_room = True
        self._legs.let_go(live, reason)
        live.move(state)
        self._record(live, event, now, reason or "")
        self._queue.remove(live.request)
        self._deadlines.drop(live.request)
        del self._requests[live.request]
        self._emit(Ended(live.request, live.summary()))

    # ---- small parts

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _wait(self, live: LiveRequest, until: float) -> None:
        """The one deadline of a request: of its present wait, or its own if that is sooner."""
        self._deadlines.set(live.request, until if live.deadline_at is None else min(until, live.deadline_at))

    def _record(self, live: LiveRequest, event: LifecycleEvent, now: float, detail: str = "") -> None:
        num_tokens = len(live.spec.token_ids) if event is _E.ARRIVED else len(live.output_ids)
        self._emit(Lifecycle(live.request, event, now, num_tokens=num_tokens, detail=detail))
