"""Where a request goes, and who waits for a place: the part of the conductor before the first message to D.

1. `arrive`: a new request is placed, unless one that waits may not be passed.
2. `place`: the policy (`router.policy`) names D and P, or D alone, and the legs reserve there. Without a
   place the request waits in the queue (`router.admission`), or is refused: at once if no worker could ever
   hold it or its wait would be too long, else at the end of its wait. One that had a place is told why it
   lost that.
3. `room_may_be_free` notes what may let another in; `drain` then tries those that wait, each tenant in its
   turn.
4. `over`: a request that had a place, or waited for one, is no more.

The one owner of the queue, of how long prompts are and answers are expected to be, and of where a session
went last. What
becomes of a request that is refused is the conductor's (`fail`).
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.block_hash import hash_blocks
from cluster.errors import BatonError
from router.admission import AdmissionQueue
from router.affinity import Affinity, Near
from router.attempt import LiveRequest
from router.config import ConductorConfig
from router.fair_lines import Turn
from router.legs import Legs
from router.live_requests import LiveRequests
from router.outcome import rejection
from router.output_lengths import OutputLengths
from router.policy import Placement, PlacementPolicy, PlacementRequest, Reject, RejectReason
from router.prompt_lengths import PromptLengths
from router.worker_book import WorkerBook


class Placing:
    """Finds places; owns who waits for one."""

    def __init__(
        self,
        config: ConductorConfig,
        policy: PlacementPolicy,
        workers: WorkerBook,
        legs: Legs,
        requests: LiveRequests,
        fail: Callable[[LiveRequest, BatonError, float], None],
    ) -> None:
        self._config = config
        self._policy = policy
        self._workers = workers
        self._legs = legs
        self._requests = requests
        self._fail = fail
        self._lengths = OutputLengths()
        self._prompts = PromptLengths()
        self._affinity = Affinity()
        self._queue = AdmissionQueue(config.max_queued, config.max_overtake_s)
        self._has_room = False

    @property
    def num_queued(self) -> int:
        """Requests accepted and not yet sent to any worker."""
        return len(self._queue)

    def arrive(self, live: LiveRequest, now: float) -> None:
        """A new request."""
        if (sample := self._prompts.add(len(live.spec.token_ids))) is not None:
            slo, well_in = self._config.slo, self._config.policy.elastic.early
            step_s = min(slo.tpot_s, slo.gap_s)
            self._workers.view().fleet.expect(sample, well_in * slo.ttft_s, step_s)
        if self._queue.may_pass(now):
            self.place(live, now)
        else:
            self._enqueue(live, now)

    def place(self, live: LiveRequest, now: float) -> RejectReason | None:
        """Reserve for a request in QUEUED, or queue it, or fail it. Returns why it has to wait, if it has."""
        register = self._workers.any_register()
        if register is not None and not live.hashes:
            block_size, salt = register.geometry.block_size, live.spec.cache_salt
            live.hashes = tuple(hash_blocks(live.spec.token_ids, block_size, register.fingerprint, salt))
        decision = self._policy.place(self._workers.view(), self._placement_request(live, now), now)
        if isinstance(decision, Placement):
            self._queue.placed(live.request, self._turn(live))
            near = Near(decision.prefill or decision.decode, decision.decode)
            self._affinity.note(live.spec.tenant, live.spec.affinity, near)
            self._requests.wait(live, now + self._legs.reserve(live, decision, now).wait_s)
            return None
        if decision.reason is RejectReason.BUSY:
            live.found_full_at = self._workers.view().abilities
            if live.is_recovering:  # somebody is here: what it waits for now is room
                live.is_recovering = False
                live.wait_until = now + self._config.queue_timeout_s
        if decision.reason is RejectReason.NO_WORKER and not live.is_recovering:
            live.is_recovering = True
            live.wait_until = now + self._config.recovery_wait_s
        is_final = decision.reason in (RejectReason.TOO_LARGE, RejectReason.BACKLOG)
        if not is_final and now < live.wait_until:
            self._enqueue(live, now)
            return decision.reason
        self._reject(live, decision, now)
        return None

    def room_may_be_free(self) -> None:
        """Something happened that may let one that waits be placed."""
        self._has_room = True

    def drain(self, now: float) -> None:
        """If there may be room, place those that wait; see `router.admission` for who may pass whom. One that
        is as large as one that has just found no room is not tried."""
        if not self._has_room:
            return
        self._has_room = False
        if not len(self._queue):
            return
        too_large: LiveRequest | None = None
        for request in self._queue.candidates():
            live = self._requests[request]
            if too_large is not None and live.is_as_large_as(too_large):
                continue
            reason = RejectReason.BUSY if self._is_still_busy(live, now) else self.place(live, now)
            if reason is RejectReason.BUSY:
                too_large = live
            if reason is not None and self._queue.is_overdue(request, now):
                break

    def answered(self, live: LiveRequest) -> None:
        """Its answer is complete: what others like it may be expected to need."""
        if not live.spec.is_part:
            self._lengths.add(len(live.spec.token_ids), len(live.output_ids))

    def over(self, live: LiveRequest, now: float) -> None:
        """It wants no place any more; call before its legs let go."""
        if live.attempt is not None:
            self._queue.departed(now)
            self.room_may_be_free()
        self._queue.remove(live.request)

    # ---- its parts

    def _is_still_busy(self, live: LiveRequest, now: float) -> bool:
        """One in the queue would find what it found before: nobody has room, and nobody came, went or changed
        what it may do since. Cheap: under overload most who try are such."""
        view = self._workers.view()
        return live.found_full_at == view.abilities and now < live.wait_until and view.is_full

    def _placement_request(self, live: LiveRequest, now: float) -> PlacementRequest:
        expected = self._lengths.expect(len(live.spec.token_ids))
        near = self._affinity.of(live.spec.tenant, live.spec.affinity)
        return live.placement_request(expected, self._config.max_backlog_s, now, near)

    def _reject(self, live: LiveRequest, reject: Reject, now: float) -> None:
        """It finds no place. One that had one is told why it lost that."""
        if live.cause is None:
            self._legs.stats.rejected(reject.reason.value)
        # who waits now has gone or been refused within `queue_timeout_s`
        queue_s = min(self._queue.retry_after_s(now, live.spec.tenant), self._config.queue_timeout_s)
        retry_after_s = max(queue_s, live.retry_after_s)
        self._fail(live, live.cause or rejection(reject, live.spec, retry_after_s), now)

    def _enqueue(self, live: LiveRequest, now: float) -> None:
        if live.request in self._queue:
            self._requests.wait(live, live.wait_until)
            return
        if live.cause is None and not live.spec.goes_on:  # those that had a place go before newcomers
            wait_s = None if live.is_recovering else self._queue.expected_wait_s(now, live.spec.tenant)
            late_s = 0.0 if wait_s is None else wait_s - (live.wait_until - now)
            if late_s > 0:
                late_s = min(late_s, self._config.queue_timeout_s)  # see `_reject`
                self._reject(live, Reject(RejectReason.QUEUE_TOO_SLOW, retry_after_s=late_s), now)
                return
            if self._queue.is_full:
                displaced = self._queue.displaced_by(live.spec.tenant, live.spec.share)
                refused = live if displaced is None else self._requests[displaced]
                self._reject(refused, Reject(RejectReason.QUEUE_FULL), now)
                if displaced is None:
                    return
        self._queue.add(live.request, live.order, now, self._turn(live))
        self._requests.wait(live, live.wait_until)

    def _turn(self, live: LiveRequest) -> Turn:
        """Whose turn it takes, and how much of it: nothing the second time."""
        spec = live.spec
        output = min(spec.sampling.max_tokens, self._lengths.expect(len(spec.token_ids)))
        work = len(spec.token_ids) + output if live.num_reserves == 0 else 0.0
        return Turn(spec.tenant, spec.share, work)
