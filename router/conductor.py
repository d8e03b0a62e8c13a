"""The conductor: decides every accepted request's fate, from arrival to its last token. Sans-IO.

Life of a request (`handle` is called with each event, in the order they happened):

1. `Submitted`: place it (`router.policy`), or queue it, or refuse it. QUEUED; RESERVE goes to D.
2. `Grant`: RESERVED, then PREFILL goes to P with D's lease (or D prefills itself): PREFILLING.
   `Nack`: the next candidate, the queue, or the refusal that no worker could ever hold it.
3. `FirstToken`: delivered at once; STREAMING_KV (DECODING when local). If it ends the request, D's lease is given up.
4. `Committed`: DECODING; P is done with it.
5. `Tokens`: delivered in order, each index once; with the finish reason DONE.
6. The client finishes or leaves: FINISH or ABORT to every holder, nothing remains here.
7. A worker is lost, an attempt fails, a wait ends: RETRY. The holders that live are told, and attempt + 1
   is placed elsewhere with the prompt *and the tokens already delivered* as its input: the same bits go on at
   the next index. When nothing can serve it, the client gets the cause at once.

Every wait has its end (`ConductorConfig`):

    QUEUED, no place       queue_timeout_s, retry_wait_s after a loss     → Overloaded, or the loss
    QUEUED, RESERVE sent   reserve_timeout_s                              → retry, D avoided
    PREFILLING             prefill_timeout_s + 4 x the predicted TTFT     → retry, P avoided
    committed, no token 0  first_token_timeout_s                          → retry, P avoided
    STREAMING_KV           commit_timeout_s                               → retry, both avoided
    DECODING               decode_silence_s without a token               → retry, D avoided
    any                    the request's own deadline                     → DeadlineExceeded

These are the last resort: a dead worker's stream breaks in milliseconds (`WorkerGone`), a hung process misses
heartbeats, a hung engine does not step (`WorkerBook`). Leases are renewed per D at a third of their time.

Stale, duplicate and unknown messages are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.block_hash import hash_blocks
from cluster.errors import BatonError, DeadlineExceeded, InternalError, NotReady, Overloaded, WorkerLost
from cluster.ids import Attempt, Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec, RequestState
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Drained,
    Finish,
    FirstToken,
    Grant,
    Heartbeat,
    Nack,
    NackReason,
    Prefill,
    Refused,
    Register,
    RenewLeases,
    Reserve,
    TokenRow,
    Tokens,
    WorkerLoad,
    WorkerState,
    WorkerToRouter,
)
from router.admission import AdmissionQueue
from router.attempt import AttemptRecord, LiveRequest, Order
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
from router.delivery import Failed, NewTokens, RequestSummary
from router.leases import LeaseKeeper
from router.outcome import context_length_exceeded, error_of_failed_attempt
from router.policy import LeastTtft, Placement, PlacementPolicy, PlacementRequest, Reject, RejectReason
from router.view import InFlight, WorkerBook

_S = RequestState
_E = LifecycleEvent


class Conductor:
    """Single owner of all requests of this router. Not thread-safe; events are handled one at a time.

    Raises (from `handle`):
        IllegalTransition: a bug of ours; the state of the conductor cannot be trusted any more.
    """

    def __init__(self, config: ConductorConfig, policy: PlacementPolicy | None = None) -> None:
        self._config = config
        self._policy = policy or LeastTtft(config.policy)
        self._requests: dict[RequestId, LiveRequest] = {}
        self._queue = AdmissionQueue(config.max_queued, config.max_overtake_s)
        self._deadlines: Deadlines[RequestId] = Deadlines()
        self._leases = LeaseKeeper()
        self._num_submitted = 0
        self._has_room = False  # something happened that may let a queued request be placed
        self._actions: list[Action] = []
        self.workers = WorkerBook(config.stall_timeout_s)
        self.num_stale_messages = 0

    # ---- the seam

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, in order. `now` never goes back."""
        match event:
            case FromWorker(worker, epoch, message):
                if self.workers.epoch(worker) != epoch:
                    self.num_stale_messages += 1
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
        times = [at for at in (self._deadlines.next(), self._leases.next_renewal()) if at is not None]
        return min(times, default=None)

    def quiet(self) -> bool:
        """Whether nothing of any request is left in here."""
        return not (
            self._requests
            or len(self._queue)
            or len(self._deadlines)
            or len(self._leases)
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
            order=self._num_submitted,
            wait_until=now + self._config.queue_timeout_s,
        )
        self._requests[spec.request] = live
        self._record(live, _E.ARRIVED, now, num_tokens=len(spec.token_ids))
        if not self._queue.may_pass(now):
            self._enqueue(live, now)
        else:
            self._place(live, now)

    def _place(self, live: LiveRequest, now: float) -> bool:
        """Reserve for a request in QUEUED, or queue it, or fail it. False: it has to wait."""
        decision = self._policy.place(self.workers.view(), self._placement_request(live), now)
        if isinstance(decision, Placement):
            self._reserve(live, decision, now)
            return True
        if decision.reason is RejectReason.BUSY:
            self._enqueue(live, now)
            return False
        self._fail(live, self._rejection(live, decision, now), now)
        return True

    def _placement_request(self, live: LiveRequest) -> PlacementRequest:
        register = self.workers.any_register()
        if register is not None and not live.hashes:
            block_size = register.geometry.block_size
            live.hashes = hash_blocks(
                live.spec.token_ids, block_size, register.fingerprint, live.spec.cache_salt
            )
        return PlacementRequest(
            num_tokens=len(live.spec.token_ids) + len(live.output_ids),
            num_prompt_tokens=len(live.spec.token_ids),
            max_tokens=live.spec.sampling.max_tokens,
            hashes=live.hashes,
            avoid=frozenset(live.avoid),
            too_large_for=frozenset(live.too_large_for),
        )

    def _rejection(self, live: LiveRequest, reject: Reject, now: float) -> BatonError:
        if live.cause is not None:
            return live.cause
        if reject.reason is RejectReason.TOO_LARGE:
            return context_length_exceeded(live.spec, reject.limit_tokens)
        return NotReady("No decode worker is ready.", retry_after_s=self._queue.retry_after_s(now))

    def _overloaded(self, live: LiveRequest, why: str, now: float) -> Overloaded:
        retry_after_s = max(self._queue.retry_after_s(now), live.retry_after_s)
        return Overloaded(f"The cluster is at its capacity: {why}.", retry_after_s=retry_after_s)

    def _enqueue(self, live: LiveRequest, now: float) -> None:
        if live.request in self._queue:
            return
        if self._queue.is_full:
            self._fail(live, live.cause or self._overloaded(live, "its queue is full", now), now)
            return
        self._queue.add(live.request, live.order, now)
        self._wait(live, live.wait_until)

    def _drain_queue(self, now: float) -> None:
        """Place those that wait, oldest first; see `router.admission` for who may pass whom."""
        self._has_room = False
        for request in self._queue.candidates():
            live = self._requests[request]
            if not self._place(live, now) and self._queue.is_overdue(request, now):
                break

    # ---- one attempt, in the order of its life

    def _reserve(self, live: LiveRequest, placement: Placement, now: float) -> None:
        self._queue.remove(live.request)
        decode = self.workers.register(placement.decode)
        live.num_reserves += 1
        attempt = AttemptRecord(
            number=Attempt(live.num_reserves),
            base=len(live.output_ids),
            decode=decode.worker,
            prefill=placement.prefill,
            predicted_ttft_s=placement.predicted_ttft_s,
        )
        live.attempt = attempt
        live.last_prefill, live.last_decode = attempt.prefiller, attempt.decode
        if attempt.prefill is not None:
            self.workers.place(attempt.prefill, live.request, InFlight(placement.prefill_tokens, 0))
            self.workers.believe_cached(attempt.prefill, live.hashes)
        local_tokens = placement.prefill_tokens if attempt.prefill is None else 0
        self.workers.place(attempt.decode, live.request, InFlight(local_tokens, placement.decode_blocks))
        self.workers.believe_cached(attempt.decode, live.hashes)
        reserve = Reserve(
            request=live.request,
            attempt=attempt.number,
            token_ids=live.input_ids(),
            num_prompt_tokens=len(live.spec.token_ids),
            sampling=live.spec.sampling,
            cache_salt=live.spec.cache_salt,
            lease_ttl_s=self._config.lease_ttl_s,
            local=attempt.prefill is None,
        )
        self._actions.append(Send(attempt.decode, reserve))
        self._record(live, _E.PLACED, now, worker=attempt.decode)
        self._wait(live, now + self._config.reserve_timeout_s)

    def _on_message(self, worker: WorkerId, message: WorkerToRouter, now: float) -> None:
        match message:
            case Tokens(rows=rows):
                for row in rows:
                    self._on_row(worker, row, now)
            case Heartbeat(state=state, load=load):
                self._on_heartbeat(worker, state, load, now)
            case Grant() | Nack() | FirstToken() | Committed() | AttemptFailed():
                live = self._requests.get(message.request)
                attempt = None if live is None else live.attempt
                if (
                    live is None
                    or attempt is None
                    or attempt.number != message.attempt
                    or worker not in (attempt.decode, attempt.prefill)
                    or not self._on_attempt_message(worker, live, attempt, message, now)
                ):
                    self.num_stale_messages += 1
            case Register() | Drained() | Refused():
                pass  # membership is the driver's

    def _on_attempt_message(
        self,
        worker: WorkerId,
        live: LiveRequest,
        attempt: AttemptRecord,
        message: Grant | Nack | FirstToken | Committed | AttemptFailed,
        now: float,
    ) -> bool:
        """Take a message of the current attempt from one of its workers; False if it comes out of turn."""
        match message:
            case AttemptFailed():
                self._on_attempt_failed(worker, live, attempt, message, now)
                return True
            case FirstToken() if worker == attempt.prefiller:
                return self._on_first_token(live, attempt, message, now)
            case Grant() if worker == attempt.decode and live.state is _S.QUEUED:
                self._on_grant(live, attempt, message, now)
                return True
            case Nack() if worker == attempt.decode and live.state is _S.QUEUED:
                self._on_nack(live, attempt, message, now)
                return True
            case Committed() if worker == attempt.decode:
                return self._on_committed(live, attempt, message, now)
            case _:
                return False

    def _on_grant(self, live: LiveRequest, attempt: AttemptRecord, grant: Grant, now: float) -> None:
        live.move(_S.RESERVED)
        attempt.lease = grant.lease
        self._leases.add(attempt.decode, grant.lease, grant.ttl_s, now)
        self._record(live, _E.GRANTED, now, worker=attempt.decode)
        live.move(_S.PREFILLING)
        if live.prefill_sent_at is None:
            live.prefill_sent_at = now
        if attempt.prefill is not None:
            decode = self.workers.register(attempt.decode)
            assert decode.kv_address is not None  # the driver refuses a decode worker without one
            prefill = Prefill(
                request=live.request,
                attempt=attempt.number,
                token_ids=live.input_ids(),
                num_prompt_tokens=len(live.spec.token_ids),
                sampling=live.spec.sampling,
                cache_salt=live.spec.cache_salt,
                decode_worker=attempt.decode,
                decode_epoch=decode.epoch,
                kv_address=decode.kv_address,
                lease=grant.lease,
                skip_tokens=grant.cached_tokens,
            )
            attempt.prefill_holds = True
            self._actions.append(Send(attempt.prefill, prefill))
        self._record(live, _E.PREFILL_SENT, now, worker=attempt.prefiller)
        self._wait(live, now + self._config.prefill_timeout_s + 4 * attempt.predicted_ttft_s)

    def _on_nack(self, live: LiveRequest, attempt: AttemptRecord, nack: Nack, now: float) -> None:
        """Not here: the next candidate. The refusal holds nothing and costs none of the attempts."""
        live.attempt = None
        live.retry_after_s = nack.retry_after_s
        if nack.reason is NackReason.TOO_LARGE:
            live.too_large_for.add(attempt.decode)
            self.workers.remove(attempt.decode, live.request)
        else:
            self.workers.refused(
                attempt.decode, live.request, whatever_size=nack.reason is not NackReason.NO_BLOCKS
            )
        if attempt.prefill is not None:
            self.workers.remove(attempt.prefill, live.request)
        self._place(live, now)

    def _on_first_token(
        self, live: LiveRequest, attempt: AttemptRecord, message: FirstToken, now: float
    ) -> bool:
        is_committed = live.state is _S.DECODING
        if attempt.has_first_token or not (is_committed or live.state is _S.PREFILLING):
            return False
        attempt.has_first_token = True
        self.workers.prefilled(attempt.prefiller, live.request)
        if live.first_token_at is None:
            live.first_token_at = now
            live.prefill_s = message.prefill_s
            live.queue_s = (live.prefill_sent_at or now) - live.arrived_at + message.queue_s
            live.cached_tokens = min(message.cached_tokens, len(live.spec.token_ids))
            self._record(live, _E.FIRST_TOKEN, now, worker=attempt.prefiller)
        if attempt.prefill is None:
            if message.finish_reason is None:
                self._start_decoding(live, attempt, now)
            else:
                attempt.decode_holds = False
        elif is_committed:
            self.workers.remove(attempt.prefill, live.request)
            self._wait(live, now + self._config.decode_silence_s)
        else:
            live.move(_S.STREAMING_KV)
            self._wait(live, now + self._config.commit_timeout_s)
        outputs, finish = [message.output, *attempt.early], message.finish_reason or attempt.early_finish
        attempt.early = []
        self._deliver(live, outputs, finish, now)
        return True

    def _on_committed(
        self, live: LiveRequest, attempt: AttemptRecord, message: Committed, now: float
    ) -> bool:
        if attempt.prefill is None or live.state not in (_S.PREFILLING, _S.STREAMING_KV):
            return False
        attempt.prefill_holds = False
        self._start_decoding(live, attempt, now, message.kv_bytes, message.kv_transfer_s)
        if attempt.has_first_token:
            self.workers.remove(attempt.prefill, live.request)
        else:
            self._wait(live, now + self._config.first_token_timeout_s)
        return True

    def _start_decoding(
        self,
        live: LiveRequest,
        attempt: AttemptRecord,
        now: float,
        kv_bytes: int = 0,
        kv_transfer_s: float = 0.0,
    ) -> None:
        live.move(_S.DECODING)
        if live.decode_started_at is None:
            live.decode_started_at = now
        self._actions.append(
            Lifecycle(
                live.request,
                _E.DECODE_STARTED,
                now,
                worker=attempt.decode,
                kv_bytes=kv_bytes,
                kv_transfer_s=kv_transfer_s,
            )
        )
        self._wait(live, now + self._config.decode_silence_s)

    def _on_row(self, worker: WorkerId, row: TokenRow, now: float) -> None:
        live = self._requests.get(row.request)
        attempt = None if live is None else live.attempt
        if live is None or attempt is None or attempt.number != row.attempt or attempt.decode != worker:
            self.num_stale_messages += 1
            return
        order, new = (Order.GAP, ()) if live.state is not _S.DECODING else attempt.take_row(row)
        if order is Order.GAP:
            self._retry(live, InternalError("A decode worker skipped a token."), {worker}, now)
        elif order is Order.DUPLICATE:
            self.num_stale_messages += 1
        else:
            if row.finish_reason is not None:
                attempt.decode_holds = False
            if not attempt.has_first_token:
                attempt.early.extend(new)
                attempt.early_finish = row.finish_reason
                return
            self._wait(live, now + self._config.decode_silence_s)
            self._deliver(live, new, row.finish_reason, now)

    def _deliver(
        self, live: LiveRequest, outputs: Sequence[TokenOutput], finish: FinishReason | None, now: float
    ) -> None:
        """Hand the next tokens to the client. Never more than it asked for, whatever a worker sends."""
        room = live.spec.sampling.max_tokens - len(live.output_ids)
        if len(outputs) >= room:
            outputs, finish = outputs[:room], finish or FinishReason.LENGTH
        live.output_ids.extend(output.token_id for output in outputs)
        live.last_token_at = now
        self._actions.append(Deliver(live.request, NewTokens(tuple(outputs), finish)))
        if finish is not None:
            self._record(live, _E.LAST_TOKEN, now, num_tokens=len(live.output_ids))
            self._finish(live, now)

    # ---- trouble

    def _on_attempt_failed(
        self, worker: WorkerId, live: LiveRequest, attempt: AttemptRecord, failure: AttemptFailed, now: float
    ) -> None:
        if worker == attempt.decode:
            attempt.decode_holds = False
        if worker == attempt.prefill:
            attempt.prefill_holds = False
        error = error_of_failed_attempt(failure)
        if failure.retryable:
            self._retry(live, error, {worker}, now, f"{worker}: {failure.code}: {failure.message}")
        else:
            self._fail(live, error, now, f"{worker}: {failure.code}: {failure.message}")

    def _on_gone(self, worker: WorkerId, epoch: Epoch, reason: str, now: float) -> None:
        if self.workers.epoch(worker) != epoch:
            self.num_stale_messages += 1
            return
        requests = self.workers.leave(worker)
        self._leases.leave(worker)
        for request in requests:
            self._retry(self._requests[request], _lost(), set(), now, f"{worker}: {reason}")
        self._has_room = True  # those that wait for this worker alone must hear of it

    def _on_joined(self, register: Register, now: float) -> None:
        known = self.workers.epoch(register.worker)
        if known is not None:
            self._on_gone(register.worker, known, f"replaced by epoch {register.epoch}", now)
        self.workers.join(register, now)

    def _on_heartbeat(self, worker: WorkerId, state: WorkerState, load: WorkerLoad, now: float) -> None:
        self._has_room = True
        if self.workers.heartbeat(worker, state, load, now):
            for request in self.workers.in_flight_of(worker):
                self._retry(self._requests[request], _lost(), set(), now, f"{worker}: its engine is stuck")

    def _on_tick(self, now: float) -> None:
        for request in self._deadlines.pop_due(now):
            self._on_deadline(self._requests[request], now)
        for worker, leases in self._leases.pop_due(now):
            self._actions.append(Send(worker, RenewLeases(leases=leases)))

    def _on_deadline(self, live: LiveRequest, now: float) -> None:
        if live.deadline_at is not None and now >= live.deadline_at:
            self._fail(live, DeadlineExceeded("The request's deadline passed."), now)
            return
        attempt = live.attempt
        if attempt is None:
            error = live.cause or self._overloaded(live, "no room became free in time", now)
            self._fail(live, error, now)
        elif live.state is _S.QUEUED:
            self._retry(live, _lost(), {attempt.decode}, now, f"{attempt.decode}: RESERVE not answered")
        elif live.state is _S.STREAMING_KV:
            self._retry(live, _lost(), {attempt.prefiller, attempt.decode}, now, "no COMMIT in time")
        elif not attempt.has_first_token:
            self._retry(
                live, _lost(), {attempt.prefiller}, now, f"{attempt.prefiller}: no first token in time"
            )
        else:
            self._retry(live, _lost(), {attempt.decode}, now, f"{attempt.decode}: no token in time")

    def _retry(
        self, live: LiveRequest, cause: BatonError, avoid: set[WorkerId], now: float, detail: str = ""
    ) -> None:
        """End the attempt and place the next one, if there may be one; else the client gets `cause`."""
        detail = detail or str(cause)
        if live.num_attempts >= self._config.max_attempts:
            self._fail(live, cause, now, detail)
            return
        self._let_go(live, detail, now)
        live.move(_S.RETRY)
        self._record(live, _E.RETRIED, now, detail=detail)
        live.cause = cause
        live.avoid |= avoid
        live.num_attempts += 1
        live.wait_until = now + self._config.retry_wait_s
        live.move(_S.QUEUED)
        self._place(live, now)

    # ---- the end

    def _finish(self, live: LiveRequest, now: float) -> None:
        decode = live.attempt.decode if live.attempt is not None else None
        self._let_go(live, None, now)
        live.move(_S.DONE)
        self._record(live, _E.FINISHED, now, num_tokens=len(live.output_ids))
        register = None if decode is None else self.workers.register(decode)
        if register is not None:  # the next turn of the chat finds prompt and answer there
            block_size, salt = register.geometry.block_size, live.spec.cache_salt
            hashes = hash_blocks(live.input_ids(), block_size, register.fingerprint, salt)
            self.workers.believe_cached(register.worker, hashes)
        self._close(live)

    def _abort(self, live: LiveRequest, reason: str, now: float) -> None:
        self._let_go(live, reason, now)
        live.move(_S.ABORTED)
        self._record(live, _E.ABORTED, now, num_tokens=len(live.output_ids), detail=reason)
        self._close(live)

    def _fail(self, live: LiveRequest, error: BatonError, now: float, detail: str = "") -> None:
        self._let_go(live, detail or str(error), now)
        live.move(_S.ABORTED)
        self._actions.append(Deliver(live.request, Failed(error)))
        self._record(live, _E.FAILED, now, num_tokens=len(live.output_ids), detail=detail or str(error))
        self._close(live)

    def _let_go(self, live: LiveRequest, abort_reason: str | None, now: float) -> None:
        """End the current attempt, if any: whoever may hold state of it and is still here is told, with
        FINISH (no reason) or ABORT."""
        attempt = live.attempt
        if attempt is None:
            return
        for worker, holds in (
            (attempt.prefill, attempt.prefill_holds),
            (attempt.decode, attempt.decode_holds),
        ):
            if worker is None:
                continue
            if holds and self.workers.epoch(worker) is not None:
                end = (
                    Finish(request=live.request, attempt=attempt.number)
                    if abort_reason is None
                    else Abort(request=live.request, attempt=attempt.number, reason=abort_reason)
                )
                self._actions.append(Send(worker, end))
            self.workers.remove(worker, live.request)
        if attempt.lease is not None:
            self._leases.drop(attempt.decode, attempt.lease)
        live.attempt = None
        self._queue.departed(now)
        self._has_room = True

    def _close(self, live: LiveRequest) -> None:
        self._queue.remove(live.request)
        self._deadlines.drop(live.request)
        del self._requests[live.request]
        self._actions.append(Ended(live.request, live.summary()))

    # ---- small parts

    def _wait(self, live: LiveRequest, until: float) -> None:
        """The one deadline of a request: of its present wait, or its own if that is sooner."""
        self._deadlines.set(live.request, until if live.deadline_at is None else min(until, live.deadline_at))

    def _record(
        self,
        live: LiveRequest,
        event: LifecycleEvent,
        now: float,
        *,
        worker: WorkerId | None = None,
        num_tokens: int = 0,
        detail: str = "",
    ) -> None:
        self._actions.append(
            Lifecycle(live.request, event, now, worker=worker, num_tokens=num_tokens, detail=detail)
        )


def _lost() -> WorkerLost:
    return WorkerLost("A worker that held this request was lost, and no other could go on with it.")
