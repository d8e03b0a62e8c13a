"""The pool in virtual time: arrivals, steps, transfers. It computes what happens; a policy decides.

1. A request arrives: `Policy.arrive` names where it waits, and the policy keeps the queue.
2. A free worker asks `Policy.plan` for its next step: chunks of prompts, beside all rows that decode there.
   With no chunk and nobody waiting, it runs on to the next finish in one event (a *run*); whoever arrives
   cuts the run at the end of its current step.
3. The step ends: rows grow by a token, some finish; prompts that are complete have their first token.
4. A complete prompt decodes here or elsewhere, as the policy says. Each chunk's KV leaves when the chunk is
   computed, on links that carry one transfer at a time, each way; the request joins when the last piece is
   there.
5. A batch that outgrows the KV evicts its latest row, whose prompt and tokens are computed again.

Equal inputs give equal runs: events have a total order (time, then number).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from bench.simulator.fleet.request import Request
from bench.simulator.fleet.worker import BLOCK_TOKENS, Batch, Worker
from bench.simulator.hardware import HANDOFF_S, Hardware
from cluster.errors import BatonError
from cluster.step_model import chunk_attention


class Plan(msgspec.Struct, frozen=True):
    """One step: what rides in it beside the batch, and whether the rows that yield are in it."""

    chunks: list[tuple[Request, int]]
    runs_yielding: bool = True


class Policy(Protocol):
    """Sees the workers; decides. `simulation` calls it and nobody else does."""

    def attach(self, workers: Sequence[Worker]) -> None: ...

    def arrive(self, request: Request, now: float) -> int | None:
        """Queue it; the worker that may now have something to do. None: it is turned away."""

    def plan(self, worker: Worker, now: float) -> Plan:
        """The step that begins, while somebody waits here or yields; no prompt it has no KV room for."""

    def is_waiting(self, worker: Worker) -> bool:
        """Somebody waits here, so the next step must be asked for."""

    def decode_worker(self, request: Request, worker: Worker, now: float) -> int:
        """Where a prompt that begins on `worker` will decode."""

    def prefilled(self, request: Request, worker: Worker, now: float) -> None:
        """It has its first token and has left the queue."""

    def joined(self, request: Request, worker: Worker) -> None: ...

    def ended(self, request: Request, worker: Worker) -> None: ...

    def preempted(self, request: Request, worker: Worker, now: float) -> int:
        """Queue it again, having lost its KV on `worker`; the worker that may now have something to do."""

    def stepped(self, worker: Worker) -> None: ...


ARRIVE, STEP_END, LAND = range(3)


class Simulation:
    """Owns the workers and the clock."""

    def __init__(
        self,
        pool: Sequence[Hardware],
        requests: Iterable[Request],
        policy: Policy,
        tpot_s: float,
        use_prefix_cache: bool = True,
    ) -> None:
        holders: dict[int, int] = {}
        self.workers = [Worker(index, hardware, holders) for index, hardware in enumerate(pool)]
        self._arrivals = deque(requests)
        self.now = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.transferred_bytes = 0.0
        self._policy = policy
        self._tpot_s = tpot_s
        self._caches = use_prefix_cache
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        self._moving: dict[int, Request] = {}
        self._largest = max(hardware.kv_tokens for hardware in pool)
        policy.attach(self.workers)

    def offer(self, requests: Iterable[Request]) -> None:
        """More arrivals, after all there are."""
        self._arrivals.extend(requests)

    def run(self, until_s: float) -> None:
        """All arrivals until `until_s`, and what follows from them until then. May be called again."""
        arrivals, events = self._arrivals, self._events
        while True:
            if arrivals and (not events or arrivals[0].arrival_s <= events[0][0]):
                if arrivals[0].arrival_s > until_s:
                    break
                request = arrivals.popleft()
                self.now = request.arrival_s
                self._arrive(request)
                continue
            if not events or events[0][0] > until_s:
                break
            self.now, _, kind, index, version = heapq.heappop(events)
            if kind == LAND:
                request = self._moving.pop(index)
                worker = self.workers[request.decode_at]
                source = self.workers[request.prefill_at]
                self._release(source, request, request.num_tokens + 1)
                worker.landed.append(request)
                self._kick(worker)
                self._kick(source)  # somebody may have waited for that KV
            else:
                worker = self.workers[index]
                if worker.version == version:
                    self._end(worker)

    def _push(self, at_s: float, kind: int, index: int, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, kind, index, version))

    def _arrive(self, request: Request) -> None:
        request.num_tokens = request.num_prompt
        if request.num_prompt + request.num_output > self._largest:
            request.is_rejected = True  # nobody could ever hold it
            return
        where = self._policy.arrive(request, self.now)
        if where is None:
            request.is_rejected = True
        else:
            self._kick(self.workers[where])

    # ---- steps

    def _kick(self, worker: Worker) -> None:
        """Something waits: begin a step, or cut the run in progress after its current step."""
        if not worker.is_busy:
            self._begin(worker)
        elif worker.run_length > 1:
            length = worker.steps_until(self.now - worker.run_start_s)
            if length < worker.run_length:
                worker.run_length = length
                worker.version += 1
                end_s = worker.run_start_s + worker.run_s(length)
                self._push(max(end_s, self.now), STEP_END, worker.index, worker.version)

    def _begin(self, worker: Worker) -> None:
        joining = self._join(worker) if worker.landed else ()
        batch, yielding, policy = worker.batch, worker.yielding, self._policy
        rows, context = batch.rows, batch.context
        is_waiting = policy.is_waiting(worker)
        if is_waiting or yielding.rows:
            plan = policy.plan(worker, self.now)
            chunks = plan.chunks
            worker.runs_yielding = plan.runs_yielding and yielding.rows > 0
            if worker.runs_yielding:
                rows, context = rows + yielding.rows, context + yielding.context
        else:
            chunks = []
            worker.runs_yielding = False
        if not rows and not chunks:
            return
        tokens, attention = 0, 0.0
        for request, count in chunks:
            if not request.has_begun:
                self._begin_prompt(request, worker)
            tokens += count
            attention += chunk_attention(request.num_computed, count)
        seconds = worker.hardware.step_s(rows, context, tokens, attention)
        for request in joining:
            request.worst_gap_s = max(request.worst_gap_s, self.now - request.last_token_s + seconds)
        length = 1
        if not chunks and not is_waiting and worker.runs_yielding == (yielding.rows > 0):
            length = worker.kv_room // rows
            for group in (batch, yielding):
                if group.rows:
                    length = min(length, group.next_finish())
            length = max(1, length)
        worker.chunks = chunks
        worker.run_start_s, worker.run_base_s, worker.run_length = self.now, seconds, length
        worker.run_growth_s = worker.hardware.growth_s(rows, context)
        worker.is_busy = True
        worker.version += 1
        self._push(self.now + worker.run_s(length), STEP_END, worker.index, worker.version)

    def _join(self, worker: Worker) -> list[Request]:
        joined, waiting = [], []
        for request in worker.landed:
            needed = request.num_tokens + 1 if request.decode_at != request.prefill_at else 0
            if needed > worker.kv_room and worker.kv_used:
                waiting.append(request)
                continue
            worker.hold(needed)
            assert request.first_s is not None
            if request.first_s <= request.deadline_s:
                worker.batch.join(request)
                due_s = request.first_s - (worker.batch.steps + 1 - request.num_generated) * self._tpot_s
                worker.is_due(request, due_s)
                joined.append(request)
            else:
                if not worker.yielding.rows:
                    worker.yielded_s = self.now
                worker.yielding.join(request)
            self._policy.joined(request, worker)
        worker.landed = waiting
        return joined

    def _begin_prompt(self, request: Request, worker: Worker) -> None:
        request.has_begun = True
        request.prefill_at = worker.index
        worker.hold(request.num_tokens + 1)
        if worker.kv_room < 0:
            raise BatonError(f"The policy began request {request.index} without room for its KV.")
        if self._caches and request.blocks:
            cached = min(worker.cache.match(request.blocks) * BLOCK_TOKENS, request.num_tokens - 1)
            request.num_computed = cached
            self.num_cached_tokens += cached
        request.decode_at = self._policy.decode_worker(request, worker, self.now)

    def _end(self, worker: Worker) -> None:
        length = worker.run_length
        worker.is_busy = False
        worker.steps += length
        worker.busy_s += self.now - worker.run_start_s
        self.num_steps += length
        longest_s = worker.run_base_s + worker.run_growth_s * (length - 1)
        if worker.batch.rows:
            worker.kv_used += worker.batch.rows * length
            self._finish(worker, worker.batch, worker.batch.advance(length, longest_s))
        if worker.runs_yielding:
            waited_s = worker.run_start_s - worker.yielded_s
            worker.yielded_s = self.now
            worker.kv_used += worker.yielding.rows * length
            self._finish(worker, worker.yielding, worker.yielding.advance(length, longest_s + waited_s))
        for request, count in worker.chunks:
            request.num_computed = min(request.num_tokens, request.num_computed + count)
            is_complete = request.num_computed >= request.num_tokens
            if request.decode_at != worker.index and request.num_output - request.num_generated > 1:
                self._send(request, worker, count, is_complete)
            if is_complete:
                self._complete(request, worker)
        worker.chunks = []
        if worker.kv_used > worker.hardware.kv_tokens - worker.rows:
            self._evict(worker)
        self._policy.stepped(worker)
        self._begin(worker)

    def _finish(self, worker: Worker, group: Batch, done: list[Request]) -> None:
        for request in done:
            group.leave(request)
            request.finish_s = self.now
            request.num_generated = request.num_output
            self._release(worker, request, request.num_prompt + request.num_output)
            self._policy.ended(request, worker)

    def _release(self, worker: Worker, request: Request, num_tokens: int) -> None:
        worker.kv_used -= num_tokens
        if self._caches and request.blocks:
            full = request.num_prompt // BLOCK_TOKENS
            worker.cache.touch(request.blocks[:full], worker.cache_blocks())

    def _complete(self, request: Request, worker: Worker) -> None:
        request.num_generated += 1
        request.last_token_s = self.now
        if request.first_s is None:
            request.first_s = self.now
        self._policy.prefilled(request, worker, self.now)
        if request.num_generated >= request.num_output:
            request.finish_s = self.now
            self._release(worker, request, request.num_tokens + 1)
            self._policy.ended(request, worker)
        elif request.decode_at == worker.index:
            worker.landed.append(request)

    # ---- KV

    def _send(self, request: Request, source: Worker, num_tokens: int, is_last: bool) -> None:
        target = self.workers[request.decode_at]
        size = num_tokens * source.hardware.kv_bytes_per_token
        speed = min(source.hardware.link_bytes_s, target.hardware.link_bytes_s)
        start_s = max(self.now, source.out_free_s, target.in_free_s)
        source.out_free_s = target.in_free_s = start_s + size / speed
        self.transferred_bytes += size
        if is_last:
            self._moving[request.index] = request
            self._push(source.out_free_s + HANDOFF_S, LAND, request.index)

    def _evict(self, worker: Worker) -> None:
        """The latest row goes until the next step has room; it is computed again when there is."""
        evicted = []
        while worker.rows and worker.kv_used > worker.hardware.kv_tokens - worker.rows:
            group = worker.yielding if worker.yielding.rows else worker.batch
            request = group.pop_latest()
            grown = group.leave(request)
            worker.kv_used -= request.num_tokens + 1 + grown
            request.num_generated += grown
            request.num_tokens = request.num_prompt + request.num_generated
            request.num_computed = 0
            request.has_begun = False
            request.num_preemptions += 1
            request.last_token_s = self.now
            self.num_preemptions += 1
            evicted.append(self._policy.preempted(request, worker, self.now))
        for index in evicted:
            if index != worker.index:
                self._kick(self.workers[index])
