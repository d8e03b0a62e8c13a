"""The router's picture of its workers: what placement decides on.

1. A worker registers: `WorkerBook.join` enters it, without load, ready from its first heartbeat on.
2. Heartbeats bring its state and gauges. Between them the book adds what this conductor has placed there
   since, so that a burst does not see the same idle worker a hundred times.
3. `WorkerBook.view()` is a frozen `ClusterView` for one decision.
4. A worker is lost: `leave` returns the requests it had in flight and forgets it, beliefs included.

Counts are sums over live entries, never counters that go up and down: they cannot drift or leak. An entry
is removed when its attempt ends, whatever way.

A worker whose engine has work but does not step for `stall_timeout_s` is *stuck*: alive on its stream, but
not a candidate until it steps again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.wire.messages import Register, Role, WorkerLoad, WorkerState
from router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the moment of a decision. `prefix` is shared and only read."""

    worker: WorkerId
    epoch: Epoch
    role: Role
    is_ready: bool
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    load: WorkerLoad
    backlog_tokens: int  # prompt tokens that wait or are being computed here
    num_in_flight: int  # requests of this router
    slots_available: int
    blocks_available: int  # free or evictable
    refused_blocks: int | None  # a request of this many blocks was refused, and nothing has changed since
    last_placed: int  # order of the latest placement here; 0 = never
    prefix: PrefixIndex

    def cached_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """Tokens of the longest prefix this worker is believed to hold."""
        return self.prefix.num_cached_blocks(hashes) * self.block_size


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All workers known, by role, in order of their ids."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class InFlight:
    """One attempt's claim on one worker."""

    prefill_tokens: int  # to be computed; 0 once the prefill is over
    num_blocks: int  # beyond what was cached


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Of the load last reported, what the claims of that moment do not explain: other routers' requests,
    shared prefixes, generated tokens."""

    tokens: int = 0
    seqs: int = 0
    blocks: int = 0


@dataclass(slots=True)
class _Worker:
    register: Register
    prefix: PrefixIndex
    state: WorkerState = WorkerState.STARTING
    load: WorkerLoad = field(default_factory=WorkerLoad)
    heartbeat_at: float | None = None
    pulse_at: float = 0.0  # when the engine last stepped, or had nothing to do
    is_stuck: bool = False
    foreign: _Foreign = _Foreign()
    refused_blocks: int | None = None
    last_placed: int = 0
    in_flight: dict[RequestId, InFlight] = field(default_factory=dict)
    view: WorkerView | None = None  # None after a change


class WorkerBook:
    """Owns what the router knows of its workers."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[WorkerId, _Worker] = {}
        self._num_placed = 0
        self._view: ClusterView | None = None

    # ---- membership

    def join(self, register: Register, now: float) -> None:
        """Enter a worker. A known one must have left before."""
        assert register.worker not in self._workers, register.worker
        prefix = PrefixIndex(register.geometry.num_blocks)
        self._workers[register.worker] = _Worker(register=register, prefix=prefix, pulse_at=now)
        self._view = None

    def leave(self, worker: WorkerId) -> list[RequestId]:
        """Forget a worker; returns the requests it had in flight, oldest first."""
        self._view = None
        return list(self._workers.pop(worker).in_flight)

    def epoch(self, worker: WorkerId) -> Epoch | None:
        """The epoch of a worker that is here."""
        known = self._workers.get(worker)
        return None if known is None else known.register.epoch

    def register(self, worker: WorkerId) -> Register:
        return self._workers[worker].register

    def ids(self) -> list[WorkerId]:
        return list(self._workers)

    def state(self, worker: WorkerId) -> tuple[WorkerState, bool, WorkerLoad]:
        """(what it says of itself, whether it is stuck, its last gauges)."""
        known = self._workers[worker]
        return known.state, known.is_stuck, known.load

    def any_register(self) -> Register | None:
        return next((known.register for known in self._workers.values()), None)

    # ---- what happens there

    def heartbeat(self, worker: WorkerId, state: WorkerState, load: WorkerLoad, now: float) -> bool:
        """Take a heartbeat; True if the worker is found stuck just now."""
        known = self._workers[worker]
        has_work = load.queued_prefill_tokens > 0 or (known.register.role is Role.DECODE and load.running > 0)
        if load.steps != known.load.steps or not has_work or known.heartbeat_at is None:
            known.pulse_at = now
        was_stuck = known.is_stuck
        known.is_stuck = now - known.pulse_at >= self._stall_timeout_s
        known.state = state
        known.load = load
        known.heartbeat_at = now
        claims = known.in_flight.values()
        known.foreign = _Foreign(
            tokens=max(0, load.queued_prefill_tokens - sum(claim.prefill_tokens for claim in claims)),
            seqs=max(0, load.running + load.waiting - len(claims)),
            blocks=max(0, load.blocks_used - sum(claim.num_blocks for claim in claims)),
        )
        known.refused_blocks = None
        self._touch(known)
        return known.is_stuck and not was_stuck

    def place(self, worker: WorkerId, request: RequestId, claim: InFlight) -> None:
        """An attempt was placed here."""
        known = self._workers[worker]
        self._num_placed += 1
        known.last_placed = self._num_placed
        known.in_flight[request] = claim
        self._touch(known)

    def prefilled(self, worker: WorkerId, request: RequestId) -> None:
        """The prefill of a placed attempt is over; its blocks are still held."""
        known = self._workers.get(worker)
        if known is not None and (claim := known.in_flight.get(request)) is not None:
            known.in_flight[request] = replace(claim, prefill_tokens=0)
            self._touch(known)

    def remove(self, worker: WorkerId, request: RequestId) -> None:
        """The attempt holds nothing here any more. Fine for what is already gone."""
        known = self._workers.get(worker)
        if known is not None and known.in_flight.pop(request, None) is not None:
            known.refused_blocks = None
            self._touch(known)

    def refused(self, worker: WorkerId, request: RequestId, *, whatever_size: bool) -> None:
        """The attempt was turned away: until room is made here, no request as large (or none at all) is
        placed here."""
        known = self._workers[worker]
        claim = known.in_flight.pop(request)
        num_blocks = 0 if whatever_size else claim.num_blocks
        known.refused_blocks = (
            num_blocks if known.refused_blocks is None else min(num_blocks, known.refused_blocks)
        )
        self._touch(known)

    def believe_cached(self, worker: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Blocks with these hashes are, or will soon be, in the worker's cache."""
        known = self._workers.get(worker)
        if known is not None:
            known.prefix.insert(hashes)

    # ---- pictures

    def in_flight_of(self, worker: WorkerId) -> list[RequestId]:
        """Requests with a claim on this worker, oldest first."""
        return list(self._workers[worker].in_flight)

    def in_flight(self) -> dict[WorkerId, list[RequestId]]:
        """Every claim there is."""
        return {worker: list(known.in_flight) for worker, known in self._workers.items() if known.in_flight}

    def view(self) -> ClusterView:
        if self._view is None:
            views = [self._view_of(self._workers[worker]) for worker in sorted(self._workers)]
            self._view = ClusterView(
                prefill=tuple(view for view in views if view.role is Role.PREFILL),
                decode=tuple(view for view in views if view.role is Role.DECODE),
            )
        return self._view

    def _touch(self, known: _Worker) -> None:
        known.view = None
        self._view = None

    def _view_of(self, known: _Worker) -> WorkerView:
        if known.view is None:
            known.view = _build_view(known)
        return known.view


def _build_view(known: _Worker) -> WorkerView:
    register, claims = known.register, known.in_flight.values()
    num_blocks = register.geometry.num_blocks
    return WorkerView(
        worker=register.worker,
        epoch=register.epoch,
        role=register.role,
        is_ready=known.state is WorkerState.READY and not known.is_stuck,
        max_model_len=register.max_model_len,
        max_num_seqs=register.max_num_seqs,
        block_size=register.geometry.block_size,
        num_blocks=num_blocks,
        load=known.load,
        backlog_tokens=known.foreign.tokens + sum(claim.prefill_tokens for claim in claims),
        num_in_flight=len(claims),
        slots_available=register.max_num_seqs - known.foreign.seqs - len(claims),
        blocks_available=num_blocks - known.foreign.blocks - sum(claim.num_blocks for claim in claims),
        refused_blocks=known.refused_blocks,
        last_placed=known.last_placed,
        prefix=known.prefix,
    )
