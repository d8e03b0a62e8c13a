"""The conductor: decides every accepted request's fate, from arrival to its last token. Sans-IO.

Life of a request (`handle` is called with each event, in the order they happened):

1. `Submitted`: place it (`router.policy`), or queue it, or refuse it. QUEUED; RESERVE goes to D.
2. `Grant`: RESERVED, then PREFILL goes to P with D's lease (or D prefills itself): PREFILLING.
   `Nack`: the next candidate, the queue, or the refusal that no worker could ever hold it.
3. `FirstToken`: delivered at once; STREAMING_KV (DECODING when local). If it ends the request, D's lease is
   given up.
4. `Committed`: DECODING; P is done with it.
5. `Tokens`, `NextTokens`: delivered in order, each index once; with the finish reason DONE.
6. The client finishes or leaves: FINISH or ABORT to every holder, nothing remains here.
7. A worker is lost, an attempt fails, a wait ends: RETRY. The holders that live are told, and attempt + 1
   is placed elsewhere with the prompt *and the tokens already delivered* as its input: the same bits go on at
   the next index. When nothing can serve it, it waits for a worker to come back, then the client gets the
   cause. At most `max_attempts` are tried; one that a draining worker handed over does not count.

Every wait has its end (`router.config.ConductorConfig`). That is the last resort: a dead worker's stream
breaks in milliseconds (`WorkerGone`), a hung process misses heartbeats, a hung engine does not step
(`WorkerBook`). Leases are renewed per D at a third of their time.

Its parts: `router.placing` finds places, `router.legs` speaks with the workers of an attempt,
`router.live_requests` keeps the requests.

Stale, duplicate and unknown messages are dropped and counted, by what made them so (`StaleReason`); a lease
that nobody waits for is given back.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.clock import soonest
from cluster.errors import BatonError, DeadlineExceeded
from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestState
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.kv_events import KvEvents, KvResync, WorkerSays
from cluster.wire.messages import (
    AttemptFailed,
    Committed,
    Drained,
    FirstToken,
    Grant,
    Heartbeat,
    Nack,
    NextTokens,
    Refused,
    Register,
    RenewLeases,
    Tokens,
    WorkerLoad,
    WorkerState,
)
from router.attempt import LiveRequest
from router.cell_policy import InCells
from router.conductor_io import (
    Action,
    ClientFinished,
    ClientLeft,
    Deliver,
    Event,
    FromWorker,
    Send,
    Submitted,
    Tick,
    WorkerGone,
    WorkerJoined,
)
from router.config import ConductorConfig
from router.delivery import Failed, RequestSummary, StaleReason
from router.legs import AttemptMessage, Broken, Legs, NotTaken, Progress, give_back, is_of_attempt
from router.live_requests import LiveRequests
from router.outcome import worker_lost
from router.partner_news import PartnerNews
from router.placement_stats import PlacementStats
from router.placing import Placing
from router.policy import Elastic, PlacementPolicy
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
        self._actions: list[Action] = []
        self._stale = dict.fromkeys(StaleReason, 0)
        self._requests = LiveRequests(config, self._emit)
        self.workers = WorkerBook(config.stall_timeout_s, config.policy)
        self._partners = PartnerNews()
        self._legs = Legs(config, self.workers, self._emit)
        policy = policy or InCells(Elastic(config.policy, config.slo), config.policy.cells)
        self._placing = Placing(config, policy, self.workers, self._legs, self._requests, self._fail)

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
                self._placing.arrive(self._requests.add(spec, now), now)
            case ClientFinished(request):
                if (live := self._requests.get(request)) is not None:
                    self._finish(live, now)
            case ClientLeft(request, reason):
                if (live := self._requests.get(request)) is not None:
                    self._close(live, _S.ABORTED, _E.ABORTED, reason, now)
            case WorkerJoined(register):
                self._on_joined(register, now)
            case WorkerGone(worker, gone_epoch, reason):
                self._on_gone(worker, gone_epoch, reason, now)
            case Tick():
                self._on_tick(now)
        self._placing.drain(now)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None if nothing waits."""
        return soonest(self._requests.next_deadline(), self._legs.leases.next_renewal())

    def may_be_due_before(self, at: float) -> bool:
        """Whether `next_deadline()` can be sooner than `at`: cheap enough for every event."""
        return self._requests.may_be_due_before(at) or self._legs.leases.may_be_due_before(at)

    def quiet(self) -> bool:
        """Whether nothing of any request is left in here."""
        return not (
            len(self._requests)
            or self._placing.num_queued
            or self._requests.num_deadlines
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
    def placement_stats(self) -> PlacementStats:
        """Counts so far; they go on growing."""
        return self._legs.stats

    @property
    def num_queued(self) -> int:
        """Requests accepted and not yet sent to any worker."""
        return self._placing.num_queued

    # ---- what workers say

    def _on_message(self, worker: WorkerId, message: WorkerSays, now: float) -> None:
        match message:
            case Tokens() | NextTokens():
                for row in message.rows:
                    self._take(worker, row, now)
            case FirstToken() | Committed() | Grant() | Nack() | AttemptFailed():
                self._take(worker, message, now)
            case Heartbeat(state=state, load=load):
                self._on_heartbeat(worker, state, load, now)
            case KvEvents():
                if not self.workers.cache_changed(worker, message):
                    self._emit(Send(worker, KvResync()))
            case Register() | Drained() | Refused():
                pass  # membership is the driver's

    def _take(self, worker: WorkerId, message: AttemptMessage, now: float) -> None:
        """A message about an attempt, and what becomes of its request."""
        live = self._requests.get(message.request)
        verdict = None if live is None else self._legs.take(worker, live, message, now)
        if live is None or verdict is None:
            self._stale[StaleReason.REQUEST if live is None else StaleReason.ATTEMPT] += 1
            if isinstance(message, Grant) and not is_of_attempt(live, message):
                self._emit(Send(worker, give_back(message)))
            return
        match verdict:
            case Progress():
                self._requests.wait(live, now + verdict.wait_s)
                if verdict.outputs:
                    self._deliver(live, verdict.outputs, verdict.finish, now)
            case NotTaken():
                self._placing.place(live, now)
            case Broken(cause, culprit, detail, retryable=True):
                self._retry(live, cause, {culprit}, detail, now, counts=not verdict.handed_over)
            case Broken(cause, _, detail):
                self._fail(live, cause, now, detail)

    def _deliver(
        self, live: LiveRequest, outputs: Sequence[TokenOutput], finish: FinishReason | None, now: float
    ) -> None:
        if live.retried_at is not None:
            self._requests.record(live, _E.RESUMED, now, live.note_resumed(now))
        delivery = live.take_tokens(outputs, finish, now)
        self._emit(Deliver(live.request, delivery))
        if delivery.finish_reason is not None:
            self._requests.record(live, _E.LAST_TOKEN, now)
            self._finish(live, now)

    def _on_heartbeat(self, worker: WorkerId, state: WorkerState, load: WorkerLoad, now: float) -> None:
        self._placing.room_may_be_free()
        if (partners := self._partners.take(worker)) is not None:
            self._emit(Send(worker, partners))
        if self.workers.heartbeat(worker, state, load, now):
            detail = f"{worker}: its engine is stuck"
            for request in self.workers.in_flight_of(worker):
                self._retry(self._requests[request], worker_lost(), set(), detail, now)

    # ---- trouble

    def _on_joined(self, register: Register, now: float) -> None:
        known = self.workers.epoch(register.worker)
        if known is not None:
            self._on_gone(register.worker, known, f"replaced by epoch {register.epoch}", now)
        self.workers.join(register, now)
        self._partners.joined(register)

    def _on_gone(self, worker: WorkerId, epoch: Epoch, reason: str, now: float) -> None:
        if self.workers.epoch(worker) != epoch:
            self._stale[StaleReason.EPOCH] += 1
            return
        requests = self.workers.leave(worker)
        self._partners.left(worker)
        self._legs.leases.leave(worker)
        for request in requests:
            self._retry(self._requests[request], worker_lost(), set(), f"{worker}: {reason}", now)
        self._placing.room_may_be_free()  # those that wait for this worker alone must hear of it

    def _on_tick(self, now: float) -> None:
        for live in self._requests.pop_due(now):
            self._on_deadline(live, now)
        for worker, leases in self._legs.leases.pop_due(now):
            self._emit(Send(worker, RenewLeases(leases=leases)))

    def _on_deadline(self, live: LiveRequest, now: float) -> None:
        attempt = live.attempt
        if live.deadline_at is not None and now >= live.deadline_at:
            self._fail(live, DeadlineExceeded("The request's deadline passed."), now)
        elif attempt is None:
            self._placing.place(live, now)  # its wait is over: now or never
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
        self._placing.room_may_be_free()
        live.retry(cause, avoid, now, now + self._config.recovery_wait_s)
        self._requests.record(live, _E.RETRIED, now, detail)
        self._placing.place(live, now)

    # ---- the end

    def _finish(self, live: LiveRequest, now: float) -> None:
        self._placing.answered(live)
        self._close(live, _S.DONE, _E.FINISHED, None, now)

    def _fail(self, live: LiveRequest, error: BatonError, now: float, detail: str = "") -> None:
        self._emit(Deliver(live.request, Failed(error)))
        self._close(live, _S.ABORTED, _E.FAILED, detail or str(error), now)

    def _close(
        self, live: LiveRequest, state: RequestState, event: LifecycleEvent, reason: str | None, now: float
    ) -> None:
        """Tell the holders (ABORT, or FINISH without a reason) and forget the request."""
        self._placing.over(live, now)
        self._legs.let_go(live, reason)
        self._requests.close(live, state, event, reason or "", now)

    def _emit(self, action: Action) -> None:
        self._actions.append(action)
