"""The smallest conductor that can lead requests through cores: places, retries, and checks every token.

It checks I4 and I8 as it goes: each token index of a request arrives exactly once for the current attempt,
and equals the undisturbed run, log-probability included.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from cluster.sampling import SamplingParams, TokenOutput
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Drained,
    Finish,
    FirstToken,
    Grant,
    Nack,
    NackReason,
    NextTokens,
    Prefill,
    RenewLeases,
    Reserve,
    Tokens,
)
from tests.support.scripted_model import Oracle

MAX_ATTEMPTS = 60
NO_ATTEMPT = Attempt(0)


@dataclass(eq=False)
class Tracked:
    """One request as the router sees it."""

    request: RequestId
    params: SamplingParams
    local: bool
    salt: str
    delivered: list[int] = field(default_factory=list)
    early: dict[int, TokenOutput] = field(default_factory=dict)  # by index, ahead of a gap
    attempt: Attempt = NO_ATTEMPT
    base: int = 0  # tokens delivered before this attempt
    lengths: dict[Attempt, int] = field(default_factory=dict)
    decode: WorkerId | None = None
    prefill: WorkerId | None = None
    lease: LeaseId | None = None
    cached_tokens: int | None = None
    committed: bool = False
    outcome: str | None = None  # "done" | "aborted" | an error code
    finish_reason: object = None


class ScriptedRouter:
    """Owns the requests of a simulation."""

    def __init__(
        self,
        prefills: list[WorkerId],
        decodes: list[WorkerId],
        send: Callable[[WorkerId, object], None],
    ) -> None:
        self._prefills, self._decodes, self._send = prefills, decodes, send
        self.oracles: dict[RequestId, Oracle] = {}
        self.requests: dict[RequestId, Tracked] = {}
        self.epochs: dict[WorkerId, Epoch] = {}
        self.down: set[WorkerId] = set()
        self.alive = True
        self.queue: deque[Tracked] = deque()
        self.failures: Counter[str] = Counter()
        self.nacks: Counter[NackReason] = Counter()
        self.drained: list[WorkerId] = []
        self.lease_ttl_s = 10.0
        self._turn = 0

    @property
    def has_queued(self) -> bool:
        return bool(self.queue) and any(worker not in self.down for worker in self._decodes)

    def submit(
        self, prompt: list[int], params: SamplingParams, *, local: bool = False, salt: str = ""
    ) -> RequestId:
        request = RequestId(f"r{len(self.requests)}")
        self.oracles[request] = Oracle(tuple(prompt), params)
        tracked = self.requests[request] = Tracked(request, params, local, salt)
        self.queue.append(tracked)
        return request

    def attempt_length(self, request: RequestId, attempt: Attempt) -> int:
        return self.requests[request].lengths[attempt]

    def place_next(self) -> None:
        """Reserve for the request that waits longest, on the decode workers in turn."""
        tracked = self.queue.popleft()
        up = [worker for worker in self._decodes if worker not in self.down]
        self._turn += 1
        tracked.attempt = Attempt(tracked.attempt + 1)
        tracked.decode = up[self._turn % len(up)]
        prefills = [worker for worker in self._prefills if worker not in self.down]
        tracked.prefill = None if tracked.local or not prefills else prefills[self._turn % len(prefills)]
        tracked.base = len(tracked.delivered)
        tracked.early.clear()
        tracked.committed = False
        prompt = self.oracles[tracked.request].prompt
        token_ids = [*prompt, *tracked.delivered]
        tracked.lengths[tracked.attempt] = len(token_ids)
        reserve = Reserve(
            request=tracked.request,
            attempt=tracked.attempt,
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            sampling=tracked.params,
            cache_salt=tracked.salt,
            lease_ttl_s=self.lease_ttl_s,
            local=tracked.prefill is None,
        )
        self._send(tracked.decode, reserve)

    def abort(self, request: RequestId) -> None:
        """The client leaves."""
        tracked = self.requests[request]
        if tracked.outcome is None:
            tracked.outcome = "aborted"
            self._abort_legs(tracked)
            if tracked in self.queue:
                self.queue.remove(tracked)

    def finish(self, request: RequestId) -> None:
        """A stop string matched."""
        tracked = self.requests[request]
        if tracked.outcome is None and tracked.attempt > 0 and tracked not in self.queue:
            tracked.outcome = "aborted"
            for worker in (tracked.decode, tracked.prefill):
                if worker is not None and worker not in self.down:
                    self._send(worker, Finish(request=request, attempt=tracked.attempt))

    def renew(self) -> None:
        for worker in self._decodes:
            leases = [t.lease for t in self.requests.values() if t.decode == worker and t.lease is not None]
            if leases and worker not in self.down:
                self._send(worker, RenewLeases(leases=leases))

    def worker_lost(self, worker: WorkerId) -> None:
        self.down.add(worker)
        for tracked in self.requests.values():
            if tracked.outcome is None and tracked not in self.queue:
                lost_prefill = tracked.prefill == worker and not tracked.committed
                if tracked.decode == worker or lost_prefill:
                    self._retry(tracked, "worker_lost")

    def worker_back(self, worker: WorkerId) -> None:
        self.down.discard(worker)

    def die(self) -> None:
        self.alive = False
        self.queue.clear()
        for tracked in self.requests.values():
            tracked.outcome = tracked.outcome or "aborted"

    def check_complete(self) -> None:
        """Every request has an outcome; those that are done have exactly the undisturbed run's tokens."""
        for tracked in self.requests.values():
            assert tracked.outcome is not None, f"{tracked.request} was forgotten"
            expected = [output.token_id for output in self.oracles[tracked.request].outputs]
            if tracked.outcome == "done":
                assert tracked.delivered == expected
            else:
                assert tracked.delivered == expected[: len(tracked.delivered)]

    # ---- messages

    def receive(self, worker: WorkerId, message: object) -> None:
        match message:
            case Tokens() | NextTokens():
                rows = message.rows
                assert len({row.request for row in rows}) == len(rows)
                for row in rows:
                    tracked = self._current(row.request, row.attempt)
                    if tracked is not None:
                        assert tracked.committed, "tokens before Committed"
                        self._deliver(tracked, row.index, row.outputs, row.finish_reason)
            case FirstToken():
                tracked = self._current(message.request, message.attempt)
                if tracked is not None:
                    tracked.cached_tokens = message.cached_tokens
                    assert message.queue_s >= 0
                    assert message.prefill_s >= 0
                    self._deliver(tracked, 0, [message.output], message.finish_reason)
            case Grant():
                tracked = self._current(message.request, message.attempt)
                if tracked is None:  # aborted meanwhile; the abort is on its way
                    return
                tracked.lease = message.lease
                if tracked.prefill is not None:
                    self._prefill(tracked, message)
            case Nack():
                self.nacks[message.reason] += 1
                tracked = self._current(message.request, message.attempt)
                if tracked is not None and message.reason is NackReason.TOO_LARGE:
                    tracked.outcome = "too_large"
                elif tracked is not None:
                    self.queue.append(tracked)
                    tracked.decode = tracked.prefill = None
            case Committed():
                tracked = self._current(message.request, message.attempt)
                if tracked is not None:
                    tracked.committed = True
            case AttemptFailed():
                tracked = self._current(message.request, message.attempt)
                if tracked is None or (worker == tracked.prefill and tracked.committed):
                    return
                self.failures[message.code] += 1
                if not message.retryable:
                    tracked.outcome = message.code
                    self._abort_legs(tracked)
                else:
                    self._retry(tracked, message.code)
            case Drained():
                self.drained.append(worker)
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _current(self, request: RequestId, attempt: Attempt) -> Tracked | None:
        tracked = self.requests[request]
        if tracked.outcome is not None or tracked.attempt != attempt or tracked in self.queue:
            return None
        return tracked

    def _prefill(self, tracked: Tracked, grant: Grant) -> None:
        assert tracked.prefill is not None
        assert tracked.decode is not None
        prompt = self.oracles[tracked.request].prompt
        prefill = Prefill(
            request=tracked.request,
            attempt=tracked.attempt,
            token_ids=[*prompt, *tracked.delivered],
            num_prompt_tokens=len(prompt),
            sampling=tracked.params,
            cache_salt=tracked.salt,
            decode_worker=tracked.decode,
            decode_epoch=self.epochs[tracked.decode],
            kv_address="sim",
            lease=grant.lease,
            skip_tokens=grant.cached_tokens,
        )
        self._send(tracked.prefill, prefill)

    def _deliver(
        self, tracked: Tracked, index: int, outputs: list[TokenOutput], finish_reason: object
    ) -> None:
        expected = self.oracles[tracked.request].outputs
        for offset, output in enumerate(outputs):
            position = tracked.base + index + offset
            assert position >= len(tracked.delivered), f"{tracked.request}: token {position} twice"
            assert position not in tracked.early, f"{tracked.request}: token {position} twice"
            assert output == expected[position], f"{tracked.request}: wrong token at {position}"
            tracked.early[position] = output
        if finish_reason is not None:
            assert tracked.base + index + len(outputs) == len(expected), "finished at the wrong token"
            tracked.finish_reason = finish_reason
        while len(tracked.delivered) in tracked.early:
            tracked.delivered.append(tracked.early.pop(len(tracked.delivered)).token_id)
        if len(tracked.delivered) == len(expected):
            assert tracked.finish_reason is not None, "no finish reason with the last token"
            tracked.outcome = "done"
            if not tracked.committed and tracked.decode is not None and tracked.decode not in self.down:
                # Token 0 ended it: the decode worker still holds the lease.
                self._send(tracked.decode, Finish(request=tracked.request, attempt=tracked.attempt))

    def _abort_legs(self, tracked: Tracked) -> None:
        for worker in (tracked.decode, tracked.prefill):
            if worker is not None and worker not in self.down:
                abort = Abort(request=tracked.request, attempt=tracked.attempt, reason="the router said so")
                self._send(worker, abort)

    def _retry(self, tracked: Tracked, code: str) -> None:
        self._abort_legs(tracked)
        tracked.decode = tracked.prefill = None
        if tracked.attempt >= MAX_ATTEMPTS:
            tracked.outcome = code
        elif len(tracked.delivered) == len(self.oracles[tracked.request].outputs):
            tracked.outcome = "done"
        else:
            self.queue.append(tracked)
