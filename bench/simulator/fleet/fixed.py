"""The fixed policies that elastic is compared with, as operators tune them.

- `colocated:CHUNK`: every worker does both; a step has CHUNK tokens, decode rows first, prompts fill it up.
- `static:XpYd`: the first X workers of the pool compute prompts, the other Y decode. A prompt's KV moves as
  its chunks are done.

Both take `fcfs` or `srf` (shortest remaining first) as order of the prompts, and `least` (least loaded) or
`rr` (in turn) as choice of the worker. Prefix caches are used where a prompt happens to land on one.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Plan
from bench.simulator.fleet.worker import Worker
from cluster.step_model import StepModel, StepWork

STATIC_CHUNK = 4096  # tokens of prompts in a step of a prefill-only worker


@dataclass(frozen=True, slots=True)
class FixedSettings:
    chunk: int
    num_prefill: int = 0  # 0: colocated
    is_shortest_first: bool = False
    is_round_robin: bool = False


class FixedPolicy:
    """See the module."""

    def __init__(self, settings: FixedSettings, _: float = 0.0) -> None:
        self._settings = settings
        self._workers: Sequence[Worker] = ()
        self._queues: list[list[Request]] = []
        self._queued_tokens: list[int] = []
        self._coming: list[list[int]] = []  # per decode worker: [rows, context] that will land
        self._turn = 0
        self._decode_turn = 0

    def attach(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._queues = [[] for _ in workers]
        self._queued_tokens = [0] * len(workers)
        self._coming = [[0, 0] for _ in workers]

    def _prefill_workers(self) -> range:
        return range(self._settings.num_prefill or len(self._workers))

    def _decode_workers(self) -> range:
        return range(self._settings.num_prefill, len(self._workers))

    def arrive(self, request: Request, now: float) -> int | None:
        request.deadline_s = math.inf  # it knows none: all rows are equal
        where = self._prefill_workers()
        if self._settings.is_round_robin:
            index = where[self._turn % len(where)]
            self._turn += 1
        else:
            index = min(where, key=lambda i: self._wait_s(self._workers[i], request.num_tokens))
        self._enqueue(request, index)
        return index

    def _wait_s(self, worker: Worker, num_tokens: int) -> float:
        """Until `num_tokens` more would be computed here."""
        tokens = self._queued_tokens[worker.index] + num_tokens
        free = max(self._settings.chunk - worker.rows, 1)
        return tokens / free * _full_step_s(worker.model, self._settings.chunk, worker.context)

    def _enqueue(self, request: Request, index: int) -> None:
        queue = self._queues[index]
        if self._settings.is_shortest_first:
            insort(queue, request, key=lambda one: one.num_tokens - one.num_computed)
        else:
            queue.append(request)
        self._queued_tokens[index] += request.num_tokens - request.num_computed

    def plan(self, worker: Worker, now: float) -> Plan:
        return Plan(self._chunks(worker))

    def _chunks(self, worker: Worker) -> list[tuple[Request, int]]:
        chosen: list[tuple[Request, int]] = []
        queue = self._queues[worker.index]
        if not queue:
            return chosen
        budget = self._settings.chunk - worker.rows
        room = worker.kv_room - worker.rows
        is_full = False  # who does not fit keeps those behind from beginning
        for request in queue:
            if budget <= 0:
                break
            is_full = is_full or request.new_kv_tokens > room
            if is_full and not request.has_begun:
                continue
            room -= request.new_kv_tokens
            count = min(budget, request.num_tokens - request.num_computed)
            chosen.append((request, count))
            budget -= count
        return chosen

    def is_waiting(self, worker: Worker) -> bool:
        return bool(self._queues[worker.index])

    def decode_worker(self, request: Request, worker: Worker, now: float) -> int:
        if not self._settings.num_prefill:
            return worker.index
        where = self._decode_workers()
        if self._settings.is_round_robin:
            index = where[self._decode_turn % len(where)]
            self._decode_turn += 1
        else:
            index = min(where, key=lambda i: self._step_with(self._workers[i], request))
        self._coming[index][0] += 1
        self._coming[index][1] += request.num_tokens
        return index

    def _step_with(self, worker: Worker, request: Request) -> tuple[bool, float]:
        rows, context = self._coming[worker.index]
        is_full = worker.kv_used + context + request.num_tokens > worker.hardware.kv_tokens
        work = StepWork(worker.rows + rows + 1, worker.context + context + request.num_tokens)
        return is_full, worker.model.step_s(work)

    def prefilled(self, request: Request, worker: Worker, now: float) -> None:
        self._queues[worker.index].remove(request)
        self._recount(worker)

    def joined(self, request: Request, worker: Worker) -> None:
        if request.decode_at != request.prefill_at:
            self._arrived(request)

    def _arrived(self, request: Request) -> None:
        self._coming[request.decode_at][0] -= 1
        self._coming[request.decode_at][1] -= request.num_tokens

    def ended(self, request: Request, worker: Worker) -> None:
        if request.num_output == 1 and request.decode_at != worker.index:
            self._arrived(request)

    def preempted(self, request: Request, worker: Worker, now: float) -> int:
        index = worker.index if not self._settings.num_prefill else request.prefill_at
        self._queues[index].insert(0, request)
        self._recount(self._workers[index])
        return index

    def stepped(self, worker: Worker) -> None:
        self._recount(worker)

    def _recount(self, worker: Worker) -> None:
        queue = self._queues[worker.index]
        self._queued_tokens[worker.index] = sum(one.num_tokens - one.num_computed for one in queue)

    def facts(self) -> dict[str, Any]:
        return {}


def _full_step_s(model: StepModel, num_tokens: int, context: int) -> float:
    return model.step_s(StepWork(num_tokens, context))
