"""The router's book of its workers: who is here, how loaded, with what in their caches.

1. A worker registers: `WorkerBook.join` gives it a row of the view, without load, ready from its first
   heartbeat on.
2. Heartbeats bring its state and gauges. Between them the book adds what this conductor has placed there
   since, so that a burst does not see the same idle worker a hundred times.
3. Every change writes that worker's row (`view`); a decision finds the columns as they are.
4. A worker is lost: `leave` returns the requests it had in flight and forgets it, beliefs included.

A worker whose engine has work but does not step for `stall_timeout_s` is *stuck*: alive on its stream, but
not a candidate until it steps again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from cluster.ids import BlockHash, Epoch, RequestId, WorkerId
from cluster.step_model import StepModel
from cluster.wire.kv_events import KvEvents
from cluster.wire.messages import Register, Role, WorkerLoad, WorkerState
from router.believable import believable
from router.claims import Backlog, Claim, ClaimBook, Phase, Totals
from router.config import PolicyConfig
from router.edge_costs import EdgeCosts
from router.perf_model import model_of
from router.view import NO_REFUSAL, ClusterView, kv_bytes_per_token

_TOLD_S = 0.05  # a prompt of which a worker was told so long before its report came is part of it


class _Foreign(msgspec.Struct, frozen=True):
    """Of the load last reported, what the claims of that moment do not explain."""

    seqs: int = 0
    blocks: int = 0
    rows: int = 0
    context: int = 0
    coming_rows: int = 0
    coming_context: int = 0


@dataclass(slots=True)
class _Worker:
    row: int
    register: Register
    model: StepModel
    written_model: StepModel | None = None  # in the view
    is_load_written: bool = False  # the state and the load last reported are in the view
    state: WorkerState = WorkerState.STARTING
    load: WorkerLoad = field(default_factory=WorkerLoad)
    heartbeat_at: float | None = None
    pulse_at: float = 0.0  # when the engine last stepped, or had nothing to do
    is_stuck: bool = False
    foreign: _Foreign = field(default_factory=_Foreign)
    work: Backlog = field(default_factory=Backlog)  # seconds of prompts
    queued_load: Backlog = field(default_factory=Backlog)
    refused_blocks: int | None = None
    claims: ClaimBook = field(default_factory=ClaimBook)
    fading: list[tuple[BlockHash, ...]] = field(default_factory=list)  # left, and perhaps not reported yet
    faded: list[tuple[BlockHash, ...]] = field(default_factory=list)  # as of the heartbeat before
    kept: deque[tuple[BlockHash, ...]] = field(default_factory=deque)  # believed; see `_fade`
    num_kept: int = 0  # blocks of those
    has_reported: bool = False  # its cache, on this stream
    next_report: int = 0  # sequence number of its next report
    has_lost_report: bool = False  # and must begin anew


class WorkerBook:
    """Owns what the router knows of its workers."""

    def __init__(self, stall_timeout_s: float, config: PolicyConfig | None = None) -> None:
        self._config = config or PolicyConfig()
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[WorkerId, _Worker] = {}
        self._num_placed = 0
        self._roles: dict[WorkerId, Role] = {}  # the last of every name
        self._role_shifts: Counter[tuple[Role, Role]] = Counter()
        self._view = ClusterView()
        self._edges = EdgeCosts(self._view.fleet, self._config.elastic.handoff_s, self._config.cold_edge_s)

    # ---- membership

    def join(self, register: Register, now: float) -> None:
        """Enter a worker. A known one must have left before."""
        assert register.worker not in self._workers, register.worker
        role = self._roles.get(register.worker, register.role)
        if role is not register.role:
            self._role_shifts[role, register.role] += 1
        self._roles[register.worker] = register.role
        view, geometry = self._view, register.geometry
        row = view.take_row(register.worker)
        view.block_size, view.kv_bytes_per_token = geometry.block_size, kv_bytes_per_token(geometry)
        view.present[register.role] += 1
        view.fleet.bytes_s[row] = self._config.edge_bytes_s
        view.fleet.kv_tokens[row] = geometry.num_blocks * geometry.block_size
        view.capacity[row] = min(geometry.num_blocks * geometry.block_size, register.max_model_len - 1)
        if register.role is Role.DECODE:
            view.model_len[row] = view.capacity[row] + 1  # the last token's keys and values are not kept
        model = model_of(WorkerLoad(), self._config)
        known = _Worker(row=row, register=register, model=model, pulse_at=now)
        self._workers[register.worker] = known
        self._edges.joined(row)
        self._write(known)

    def leave(self, worker: WorkerId) -> list[RequestId]:
        """Forget a worker; returns the requests it had in flight, oldest first."""
        known = self._workers.pop(worker)
        self._view.present[known.register.role] -= 1
        self._view.free_row(worker)
        self._edges.leave(known.row)
        return known.claims.requests()

    def epoch(self, worker: WorkerId) -> Epoch | None:
        """The epoch of a worker that is here."""
        known = self._workers.get(worker)
        return None if known is None else known.register.epoch

    def register(self, worker: WorkerId) -> Register:
        return self._workers[worker].register

    def role_shifts(self) -> dict[tuple[Role, Role], int]:
        """How often a worker came back in another role: (from, to) → times."""
        return dict(self._role_shifts)

    def ids(self) -> list[WorkerId]:
        return list(self._workers)

    def state(self, worker: WorkerId) -> tuple[WorkerState, bool, WorkerLoad]:
        """(what it says of itself, whether it is stuck, its last gauges)."""
        known = self._workers[worker]
        return known.state, known.is_stuck, known.load

    def any_register(self) -> Register | None:
        for known in self._workers.values():
            return known.register
        return None

    # ---- what happens there

    def heartbeat(self, worker: WorkerId, state: WorkerState, load: WorkerLoad, now: float) -> bool:
        """Take a heartbeat; True if the worker is found stuck just now."""
        known = self._workers[worker]
        load = believable(load, known.load)
        has_work = load.queued_prefill_tokens > 0 or (known.register.role is Role.DECODE and load.running > 0)
        if load.steps != known.load.steps or not has_work or known.heartbeat_at is None:
            known.pulse_at = now
        was_stuck = known.is_stuck
        known.is_stuck = now - known.pulse_at >= self._stall_timeout_s
        known.state, known.load, known.heartbeat_at = state, load, now
        known.is_load_written = False
        known.refused_blocks = None
        self._take_load(known, load, now)
        self._fade(known)
        self._write(known)
        return known.is_stuck and not was_stuck

    def _take_load(self, known: _Worker, load: WorkerLoad, now: float) -> None:
        known.model = model_of(load, self._config)
        totals = known.claims.totals
        known.foreign = _Foreign(
            seqs=max(0, load.running + load.waiting - totals.seqs),
            blocks=max(0, load.blocks_used - totals.blocks),
            rows=max(0, load.decode_rows - totals.rows),
            context=max(0, load.decode_context - totals.context),
            coming_rows=max(0, load.coming_rows - totals.coming_rows),
            coming_context=max(0, load.coming_context - totals.coming_context),
        )
        seen = known.claims.note_report(now - _TOLD_S)
        work_s = load.on_time_prefill_s
        if load.step_model is None:
            work_s = load.queued_prefill_tokens * known.model.per_token_s
        known.work.report(work_s, _work_s(seen, known.model))
        known.queued_load.report(load.queued_load_s, _load_s(seen, known.model))

    def place(self, worker: WorkerId, request: RequestId, claim: Claim) -> None:
        """An attempt was placed here."""
        known = self._workers[worker]
        self._num_placed += 1
        self._view.fleet.last_placed[known.row] = self._num_placed
        known.claims.add(request, claim)
        self._view.prefix.expect(known.row, claim.hashes)
        self._write(known)

    def told(self, worker: WorkerId, request: RequestId, now: float) -> None:
        """The prompt of a placed attempt goes to its worker now."""
        known = self._workers[worker]
        claim = known.claims.get(request)
        assert claim is not None, (worker, request)
        known.claims.change(request, msgspec.structs.replace(claim, sent_at=now))

    def prefilled(self, worker: WorkerId, request: RequestId) -> None:
        """The prefill of a placed attempt is over; its blocks are still held."""
        known = self._workers.get(worker)
        claim = None if known is None else known.claims.get(request)
        if known is not None and claim is not None and claim.phase is Phase.PREFILL:
            self._left_queue(known, claim)
            phase = Phase.DECODE if claim.stays else Phase.HELD
            known.claims.change(request, msgspec.structs.replace(claim, phase=phase, is_seen=False))
            self._write(known)

    def decoding(self, worker: WorkerId, request: RequestId) -> None:
        """All KV of a placed attempt is on its decode worker."""
        known = self._workers.get(worker)
        claim = None if known is None else known.claims.get(request)
        if known is not None and claim is not None and claim.phase is Phase.COMING:
            known.claims.change(request, msgspec.structs.replace(claim, phase=Phase.DECODE))
            self._write(known)

    def remove(self, worker: WorkerId, request: RequestId) -> None:
        """The attempt holds nothing here any more. Fine for what is already gone."""
        known = self._workers.get(worker)
        if known is not None and self._drop(known, request) is not None:
            known.refused_blocks = None
            self._write(known)

    def refused(self, worker: WorkerId, request: RequestId, *, whatever_size: bool) -> None:
        """The attempt was turned away: until room is made here, no request as large (or none at all) is
        placed here."""
        known = self._workers[worker]
        claim = self._drop(known, request)
        assert claim is not None, (worker, request)
        num_blocks = 0 if whatever_size else claim.num_blocks
        known.refused_blocks = (
            num_blocks if known.refused_blocks is None else min(num_blocks, known.refused_blocks)
        )
        self._write(known)

    def handed_over(self, prefill: WorkerId, decode: WorkerId, num_bytes: int, exposed_s: float) -> None:
        """KV went from one to the other, and the stream stood still for so long."""
        rows = self._view.rows
        if prefill in rows and decode in rows:
            self._edges.note(rows[prefill], rows[decode], num_bytes, exposed_s)

    def cache_changed(self, worker: WorkerId, report: KvEvents) -> bool:
        """A worker reports its cache: all of it from here on, or what has changed. False: a report is missing
        before this one, so nothing it has said holds, and it has to begin anew."""
        known = self._workers[worker]
        prefix = self._view.prefix
        known.has_reported = True
        if report.sequence < known.next_report:
            return True  # it came twice
        if report.begins:
            prefix.forget(known.row)
        elif known.has_lost_report:
            return True  # it was asked to begin anew; this was under way
        elif known.next_report != report.sequence:
            prefix.forget(known.row)
            known.has_lost_report = True
            return False
        prefix.remove(known.row, report.removed)
        prefix.store(known.row, report.stored)
        known.next_report, known.has_lost_report = report.sequence + 1, False
        return True

    # ---- pictures

    def in_flight_of(self, worker: WorkerId) -> list[RequestId]:
        """Requests with a claim on this worker, oldest first."""
        return self._workers[worker].claims.requests()

    def in_flight(self) -> dict[WorkerId, list[RequestId]]:
        """Every claim there is."""
        return {name: known.claims.requests() for name, known in self._workers.items() if len(known.claims)}

    def view(self) -> ClusterView:
        """As of now; the next event changes it."""
        return self._view

    def rewrite(self) -> None:
        """All rows from what is known: nothing may change. For tests and for doubts."""
        for known in self._workers.values():
            known.is_load_written = False
            self._write(known)

    # ---- parts

    def _drop(self, known: _Worker, request: RequestId) -> Claim | None:
        claim = known.claims.remove(request)
        if claim is not None:
            self._left_queue(known, claim)
            if claim.hashes:
                known.fading.append(claim.hashes)
        return claim

    def _left_queue(self, known: _Worker, claim: Claim) -> None:
        if claim.is_seen:
            own = Totals()
            own.move(claim, 1)
            known.work.left(_work_s(own, known.model))
            known.queued_load.left(_load_s(own, known.model))

    def _fade(self, known: _Worker) -> None:
        """What left before the last heartbeat has been reported by now, as far as it stayed in the cache. A
        worker that reports nothing is believed to keep the latest of it, as much as its pool holds."""
        known.kept += known.faded
        known.num_kept += sum(map(len, known.faded))
        most = 0 if known.has_reported else known.register.geometry.num_blocks
        while known.num_kept > most:
            hashes = known.kept.popleft()
            known.num_kept -= len(hashes)
            self._view.prefix.unexpect(known.row, hashes)
        known.faded, known.fading = known.fading, []

    def _write(self, known: _Worker) -> None:
        """This worker's row of the view."""
        if not known.is_load_written:
            self._write_load(known)
        view, row, model = self._view, known.row, known.model
        fleet, register, load = view.fleet, known.register, known.load
        totals, foreign, geometry = known.claims.totals, known.foreign, register.geometry
        num_blocks = foreign.blocks + totals.blocks
        rows = foreign.rows + totals.rows - load.yielding_rows
        context = foreign.context + totals.context - load.yielding_context
        if totals.new_tokens or totals.queued_rows or known.work.foreign or known.queued_load.foreign:
            fleet.work_s[row] = known.work.value(_work_s(totals, model))
            fleet.queued_load_s[row] = known.queued_load.value(_load_s(totals, model))
        else:  # no prompt waits there
            fleet.work_s[row] = fleet.queued_load_s[row] = 0.0
        fleet.rows[row] = rows if rows > 0 else 0
        fleet.context[row] = context if context > 0 else 0
        fleet.coming_rows[row] = foreign.coming_rows + totals.coming_rows
        fleet.coming_context[row] = foreign.coming_context + totals.coming_context
        fleet.far_load_s[row] = _rows_s(
            fleet.coming_rows[row] - totals.queued_rows,
            fleet.coming_context[row] - totals.queued_context,
            model,
        )
        fleet.kv_used[row] = num_blocks * geometry.block_size
        view.write_room(
            row,
            register.max_num_seqs - foreign.seqs - totals.seqs,
            geometry.num_blocks - num_blocks,
            NO_REFUSAL if known.refused_blocks is None else known.refused_blocks,
        )

    def _write_load(self, known: _Worker) -> None:
        """What only a heartbeat changes."""
        view, fleet, row = self._view, self._view.fleet, known.row
        load, model = known.load, known.model
        is_ready = known.state is WorkerState.READY and not known.is_stuck
        is_decode = known.register.role is Role.DECODE
        if known.written_model != model:
            fleet.set_model(row, model)
            known.written_model = model
        view.write_ability(
            row, can_prefill=is_ready, can_decode=is_ready and is_decode, can_send=not is_decode
        )
        fleet.late_s[row] = load.late_prefill_s
        yielding, yielding_context = load.yielding_rows, load.yielding_context
        fleet.yield_s[row] = model.per_token_s * yielding + model.per_context_s * yielding_context
        fleet.late_rate[row], fleet.on_time_share[row] = load.late_rate, load.on_time_share
        view.set_life(row, load.row_life_s)
        if load.step_model is None:
            view.guessed.add(row)
        else:
            view.guessed.discard(row)
        known.is_load_written = True


def _work_s(totals: Totals, model: StepModel) -> float:
    return totals.new_tokens * model.per_token_s + totals.attention * model.per_attention_s


def _load_s(totals: Totals, model: StepModel) -> float:
    return _rows_s(totals.queued_rows, totals.queued_context, model)


def _rows_s(num_rows: float, context: float, model: StepModel) -> float:
    """What they add to each step."""
    return num_rows * model.per_token_s + context * model.per_context_s
