"""The two legs of an attempt: what it holds on its workers, what they are told, what they answer.

1. `reserve`: claims on both workers in the book, RESERVE to D.
2. `take` each message of the attempt's workers and say what it means for the request (`Progress`,
   `NotTaken`, `Broken`), or that it comes out of turn (None). A grant sends PREFILL to P and enters the
   lease. `overdue` says what it means that no message came in time.
3. `let_go`: claims and lease are dropped, and whoever may hold state is told.

Part of the conductor, which decides what becomes of the request; states move here only forward, within one
attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cluster.errors import BatonError, InternalError
from cluster.ids import Attempt, WorkerId
from cluster.request import LifecycleEvent, RequestState
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Finish,
    FirstToken,
    Grant,
    Nack,
    NackReason,
    Prefill,
    Reserve,
    TokenRow,
)
from router.attempt import AttemptRecord, LiveRequest, Order
from router.claims import Claim, Phase
from router.conductor_io import Action, Lifecycle, Send
from router.config import ConductorConfig
from router.leases import LeaseKeeper
from router.outcome import error_of_failed_attempt, worker_lost
from router.placement_stats import PlacementStats
from router.policy import Placement
from router.worker_book import WorkerBook

_S = RequestState
_E = LifecycleEvent

AttemptMessage = Grant | Nack | FirstToken | Committed | AttemptFailed | TokenRow


class Progress(msgspec.Struct, frozen=True):
    """The attempt goes on: `outputs` are the client's next tokens, and something is due within `wait_s`."""

    wait_s: float
    outputs: Sequence[TokenOutput] = ()
    finish: FinishReason | None = None


class NotTaken(msgspec.Struct, frozen=True):
    """The decode worker has no room; nothing is held anywhere."""


class Broken(msgspec.Struct, frozen=True):
    """The attempt cannot go on. `detail` is for logs. `handed_over`: a draining worker gives it to others."""

    cause: BatonError
    culprit: WorkerId
    detail: str
    retryable: bool
    handed_over: bool = False


Verdict = Progress | NotTaken | Broken


class Legs:
    """Owns the leases; keeps the book's claims equal to what live attempts hold."""

    def __init__(self, config: ConductorConfig, workers: WorkerBook, emit: Callable[[Action], None]) -> None:
        self._config = config
        self._workers = workers
        self._emit = emit
        self.leases = LeaseKeeper()
        self.stats = PlacementStats()

    def reserve(self, live: LiveRequest, placement: Placement, now: float) -> Progress:
        """Start the next attempt where it was placed."""
        live.num_reserves += 1
        attempt = AttemptRecord(
            number=Attempt(live.num_reserves),
            base=len(live.output_ids),
            decode=placement.decode,
            prefill=placement.prefill,
            predicted_ttft_s=placement.predicted_ttft_s,
            placed_at=now,
        )
        live.attempt = attempt
        live.last_prefill, live.last_decode = attempt.prefiller, attempt.decode
        self.stats.placed(is_local=attempt.prefill is None)
        token_ids = live.input_ids()
        self._claim(live, placement, len(token_ids), now)
        reserve = Reserve(
            request=live.request,
            attempt=attempt.number,
            token_ids=token_ids,
            num_prompt_tokens=len(live.spec.token_ids),
            sampling=live.spec.sampling,
            cache_salt=live.spec.cache_salt,
            lease_ttl_s=self._config.lease_ttl_s,
            local=attempt.prefill is None,
            slo=live.slo(now),
        )
        self._emit(Send(attempt.decode, reserve))
        self._record(live, _E.PLACED, attempt.decode, now)
        return Progress(self._config.reserve_timeout_s)

    def _claim(self, live: LiveRequest, placement: Placement, num_tokens: int, now: float) -> None:
        """What the attempt takes on its workers, in the book."""
        new, is_local = placement.prefill_tokens, placement.prefill is None
        prompt = Claim(
            Phase.PREFILL,
            num_tokens,
            new_tokens=new,
            attention=new * (num_tokens - new) + new * (new + 1) // 2,
            num_blocks=placement.decode_blocks if is_local else placement.prefill_blocks,
            stays=is_local,
            hashes=live.hashes,
            sent_at=now if is_local else None,
        )
        if placement.prefill is None:
            self._workers.place(placement.decode, live.request, prompt)
            return
        self._workers.place(placement.prefill, live.request, prompt)
        coming = Claim(Phase.COMING, num_tokens, num_blocks=placement.decode_blocks, hashes=live.hashes)
        self._workers.place(placement.decode, live.request, coming)

    def take(
        self, worker: WorkerId, live: LiveRequest, message: AttemptMessage, now: float
    ) -> Verdict | None:
        """What a message means for the request; None if it is stale, doubled or out of turn."""
        attempt = live.attempt
        if attempt is None or attempt.number != message.attempt:
            return None
        is_decode = worker == attempt.decode
        match message:
            case TokenRow() if is_decode:
                return self._take_row(live, attempt, message)
            case FirstToken() if worker == attempt.prefiller:
                return self._take_first_token(live, attempt, message, now)
            case Committed() if is_decode:
                return self._take_committed(live, attempt, message, now)
            case Grant() if is_decode and live.state is _S.QUEUED:
                return self._take_grant(live, attempt, message, now)
            case Nack() if is_decode and live.state is _S.QUEUED:
                return self._take_nack(live, attempt, message)
            case AttemptFailed() if worker in (attempt.decode, attempt.prefill):
                return self._take_failure(worker, attempt, message)
            case _:
                return None

    def overdue(self, live: LiveRequest, attempt: AttemptRecord) -> Broken:
        """What the attempt waited for did not come in time."""
        culprit, missing = attempt.decode, "no token in time"
        if live.state is _S.QUEUED:
            missing = "RESERVE not answered in time"
        elif not attempt.has_first_token:
            culprit, missing = attempt.prefiller, "no first token in time"
        elif live.state is _S.STREAMING_KV:
            culprit, missing = attempt.prefiller, f"KV not committed to {attempt.decode} in time"
        return Broken(worker_lost(), culprit, f"{culprit}: {missing}", retryable=True)

    def let_go(self, live: LiveRequest, abort_reason: str | None) -> None:
        """End the attempt, if any: whoever may hold state of it and is still here is told, with FINISH (no
        reason) or ABORT."""
        attempt = live.attempt
        if attempt is None:
            return
        live.attempt = None
        if attempt.lease is not None:
            self.leases.drop(attempt.decode, attempt.lease)
        legs = ((attempt.prefill, attempt.prefill_holds), (attempt.decode, attempt.decode_holds))
        for worker, holds in legs:
            if worker is None:
                continue
            if holds and self._workers.epoch(worker) is not None:
                self._emit(Send(worker, _farewell(live, attempt, abort_reason)))
            self._workers.remove(worker, live.request)

    # ---- one message each

    def _take_grant(self, live: LiveRequest, attempt: AttemptRecord, grant: Grant, now: float) -> Progress:
        live.move(_S.RESERVED)
        attempt.lease = grant.lease
        self.leases.add(attempt.decode, grant.lease, grant.ttl_s, now)
        self._record(live, _E.GRANTED, attempt.decode, now)
        live.move(_S.PREFILLING)
        if live.prefill_sent_at is None:
            live.prefill_sent_at = now
        if attempt.prefill is not None:
            decode = self._workers.register(attempt.decode)
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
                slo=live.slo(now),
            )
            attempt.prefill_holds = True
            self._workers.told(attempt.prefill, live.request, now)
            self._emit(Send(attempt.prefill, prefill))
        self._record(live, _E.PREFILL_SENT, attempt.prefiller, now)
        return Progress(self._config.prefill_timeout_s + 4 * attempt.predicted_ttft_s)

    def _take_nack(self, live: LiveRequest, attempt: AttemptRecord, nack: Nack) -> NotTaken:
        live.attempt = None
        live.retry_after_s = nack.retry_after_s
        if nack.reason is NackReason.TOO_LARGE:
            live.too_large_for.add(attempt.decode)
            self._workers.remove(attempt.decode, live.request)
        else:
            whatever_size = nack.reason is not NackReason.NO_BLOCKS
            self._workers.refused(attempt.decode, live.request, whatever_size=whatever_size)
        if attempt.prefill is not None:
            self._workers.remove(attempt.prefill, live.request)
        return NotTaken()

    def _take_first_token(
        self, live: LiveRequest, attempt: AttemptRecord, message: FirstToken, now: float
    ) -> Progress | None:
        is_committed = live.state is _S.DECODING
        if attempt.has_first_token or not (is_committed or live.state is _S.PREFILLING):
            return None
        attempt.has_first_token = True
        attempt.first_token_at = now
        attempt.queue_s, attempt.prefill_s = message.queue_s, message.prefill_s
        self.stats.first_token(attempt.predicted_ttft_s, now - attempt.placed_at)
        self._workers.prefilled(attempt.prefiller, live.request)
        if live.first_token_at is None:
            live.note_first_token(message, now)
            self._record(live, _E.FIRST_TOKEN, attempt.prefiller, now)
        wait_s = self._config.decode_silence_s
        if attempt.prefill is None:
            if message.finish_reason is not None:
                attempt.decode_holds = False
            self._start_decoding(live, attempt, None, now)
        elif is_committed:
            self._handed_over(attempt.prefill, live, attempt, now)
        else:
            live.move(_S.STREAMING_KV)
            wait_s = self._config.commit_timeout_s
        early, attempt.early = attempt.early, []
        return Progress(wait_s, [message.output, *early], message.finish_reason or attempt.early_finish)

    def _take_committed(
        self, live: LiveRequest, attempt: AttemptRecord, message: Committed, now: float
    ) -> Progress | None:
        if attempt.prefill is None:  # a local prefill commits with its first token
            return Progress(self._config.decode_silence_s) if attempt.has_first_token else None
        if live.state not in (_S.PREFILLING, _S.STREAMING_KV):
            return None
        attempt.prefill_holds = False
        attempt.kv_bytes = message.kv_bytes
        self._start_decoding(live, attempt, message, now)
        if not attempt.has_first_token:  # it is under way on P's stream, which may still break
            return Progress(self._config.first_token_timeout_s)
        self._handed_over(attempt.prefill, live, attempt, now)
        return Progress(self._config.decode_silence_s)

    def _take_row(self, live: LiveRequest, attempt: AttemptRecord, row: TokenRow) -> Verdict | None:
        if live.state is not _S.DECODING:
            detail = f"{attempt.decode}: tokens before the request was committed"
            return Broken(InternalError(_OUT_OF_ORDER), attempt.decode, detail, retryable=True)
        order, new = attempt.take_row(row)
        if order is Order.GAP:
            detail = f"{attempt.decode}: a token is missing before index {row.index} of the attempt"
            return Broken(InternalError(_OUT_OF_ORDER), attempt.decode, detail, retryable=True)
        if order is Order.DUPLICATE:
            return None
        if row.finish_reason is not None:
            attempt.decode_holds = False
        if not attempt.has_first_token:
            attempt.early.extend(new)
            attempt.early_finish = row.finish_reason
            return Progress(self._config.first_token_timeout_s)
        return Progress(self._config.decode_silence_s, new, row.finish_reason)

    def _take_failure(self, worker: WorkerId, attempt: AttemptRecord, failure: AttemptFailed) -> Broken:
        if worker == attempt.decode:
            attempt.decode_holds = False
        if worker == attempt.prefill:
            attempt.prefill_holds = False
        detail = f"{worker}: {failure.code}: {failure.message}"
        return Broken(
            error_of_failed_attempt(failure),
            self._culprit(worker, attempt, failure),
            detail,
            failure.retryable,
            handed_over=failure.code == "draining",
        )

    def _culprit(self, worker: WorkerId, attempt: AttemptRecord, failure: AttemptFailed) -> WorkerId:
        """Whom the next attempt avoids. A prefill worker whose transfer broke has the prompt's KV: it ships
        it again to another decode worker without recompute. Without another, decode workers prefill."""
        if worker != attempt.prefill or failure.code not in _OF_THE_TRANSFER:
            return worker
        view = self._workers.view()
        has_other = view.fleet.can_decode.sum() > view.is_ready(attempt.decode)
        return attempt.decode if has_other else worker

    # ---- small parts

    def _handed_over(self, prefill: WorkerId, live: LiveRequest, attempt: AttemptRecord, now: float) -> None:
        """KV is on D and token 0 is here: P has nothing of it any more."""
        assert attempt.first_token_at is not None
        self._workers.handed_over(prefill, attempt.decode, attempt.kv_bytes, now - attempt.first_token_at)
        self._workers.remove(prefill, live.request)

    def _start_decoding(
        self, live: LiveRequest, attempt: AttemptRecord, committed: Committed | None, now: float
    ) -> None:
        """KV is complete on D: it was committed, or never had to move."""
        live.move(_S.DECODING)
        self._workers.decoding(attempt.decode, live.request)
        if live.decode_started_at is None:
            live.decode_started_at = now
        self._emit(
            Lifecycle(
                live.request,
                _E.DECODE_STARTED,
                now,
                worker=attempt.decode,
                kv_bytes=0 if committed is None else committed.kv_bytes,
                kv_transfer_s=0.0 if committed is None else committed.kv_transfer_s,
            )
        )

    def _record(self, live: LiveRequest, event: LifecycleEvent, worker: WorkerId, now: float) -> None:
        self._emit(Lifecycle(live.request, event, now, worker=worker))


_OF_THE_TRANSFER = frozenset({"edge_lost", "peer_silent", "lease_lost", "kv_aborted"})
_OUT_OF_ORDER = "A decode worker sent tokens out of order."


def is_of_attempt(live: LiveRequest | None, message: AttemptMessage) -> bool:
    """The request is at the attempt that the message speaks of."""
    return live is not None and live.attempt is not None and live.attempt.number == message.attempt


def give_back(grant: Grant) -> Abort:
    """The answer to a lease that nobody waits for, such as one for a RESERVE that came twice: its blocks are
    free at once, and not when its time is over."""
    return Abort(request=grant.request, attempt=grant.attempt, reason="nobody waits for this lease")


def _farewell(live: LiveRequest, attempt: AttemptRecord, abort_reason: str | None) -> Finish | Abort:
    if abort_reason is None:
        return Finish(request=live.request, attempt=attempt.number)
    return Abort(request=live.request, attempt=attempt.number, reason=abort_reason)
