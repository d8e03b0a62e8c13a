"""The elastic policy in the simulated pool: `router.elastic` places, one `SloScheduler` per worker orders.

It keeps what the router would know (the columns of its `Fleet`) and hands decisions over; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.simulator.fleet.idle import idle_worker
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Plan
from bench.simulator.fleet.worker import BLOCK_TOKENS, Worker, leading_blocks
from cluster.slo_budget import bearable_s, step_budget_s
from cluster.slo_classes import DecodeBatch, Targets
from cluster.slo_schedule import SloScheduler, SloSettings
from cluster.wire.messages import Role
from router.dedication import Dedication, assigned
from router.elastic import Ask, ElasticSettings, Place, choose_decode, place
from router.fleet import Fleet
from router.output_lengths import OutputLengths
from router.planner import Kind
from router.prompt_lengths import PromptLengths

LATE_RESERVE = 0.15  # of the KV, left to requests that are on time


class ElasticPolicy:
    """See the module."""

    def __init__(
        self,
        targets: Targets,
        settings: ElasticSettings | None = None,
        scheduling: SloSettings | None = None,
        use_prefix_cache: bool = True,
        roles: Sequence[Role] | None = None,
    ) -> None:
        """`roles` by worker: a pool like the live one, where prefill workers only send and decode workers
        compute prompts for themselves alone. None: every worker does both, for anybody."""
        self._targets = targets
        self._roles = roles
        self._settings = settings or ElasticSettings()
        self._scheduling = scheduling or SloSettings()
        self._lengths = OutputLengths()
        self._prompts = PromptLengths()
        self._prefilling: list[bool] | None = None  # by worker, else it only decodes; None: all do both
        self._caches = use_prefix_cache
        self._workers: Sequence[Worker] = ()
        self._schedulers: list[SloScheduler[Request]] = []
        self._num_queued: list[int] = []  # by worker: prompts in its scheduler
        self._fleet = Fleet([], [], [])
        self._dedication: Dedication | None = None  # of a pool of equals
        self._num_placed = 0
        self.num_local = self.num_moved = 0

    def attach(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._schedulers = [SloScheduler(one.model, self._targets, self._scheduling) for one in workers]
        self._num_queued = [0] * len(workers)
        self._fleet = Fleet(
            [one.model for one in workers],
            [one.hardware.kv_tokens for one in workers],
            [one.hardware.link_bytes_s for one in workers],
        )
        if self._roles is None and all(one.hardware == workers[0].hardware for one in workers):
            hardware = workers[0].hardware
            kind = Kind(hardware.name, len(workers), hardware.model, hardware.model.mixed_s)
            self._dedication = Dedication(kind, self._targets)
            self._dedicate(self._dedication.num_prefill)
        if self._roles is not None:
            self._fleet.can_send[:] = [role is Role.PREFILL for role in self._roles]
            self._fleet.can_decode[:] = ~self._fleet.can_send

    def arrive(self, request: Request, now: float) -> int | None:
        request.deadline_s = request.arrival_s + self._targets.ttft_s
        if (sample := self._prompts.add(request.num_prompt)) is not None:
            self._fleet.expect(
                sample,
                self._settings.early * self._targets.ttft_s,
                min(self._targets.tpot_s, self._targets.gap_s),
            )
        cached = self._cached(request)
        ask = self._ask(request, cached)
        if cached is None and self._dedication is not None and self._prefilling is None:
            model = self._workers[0].model
            index = idle_worker(self._fleet, ask, model, self._targets, self._settings)
            if index is not None:
                self._enqueue(request, ask, index, index)
                return index
        decision = place(self._fleet, ask, self._targets, self._settings)
        if not isinstance(decision, Place):
            return None
        if cached is not None:
            request.num_computed = int(min(cached[decision.prefill], request.num_tokens - 1))
        self._enqueue(request, ask, decision.prefill, decision.decode)
        return decision.prefill

    def _ask(self, request: Request, cached: Any = None) -> Ask:
        expected = self._lengths.expect(request.num_prompt)
        size = self._workers[0].hardware.kv_bytes_per_token
        return Ask(
            request.num_tokens,
            max(1.0, expected - request.num_generated),
            cached,
            size,
            self._life_s,
            growth=self._growth,
        )

    @property
    def _growth(self) -> int:
        """KV that a row may yet take, half of an answer."""
        return 2 + round(self._lengths.mean / 2)

    @property
    def _life_s(self) -> float:
        return self._lengths.mean * self._targets.tpot_s

    def _cached(self, request: Request) -> Any:
        if not self._caches or not request.blocks:
            return None
        found = leading_blocks(self._workers[0].cache.holders, request.blocks)
        if not found:
            return None
        cached = np.zeros(len(self._workers))
        for index, num_blocks in found.items():
            cached[index] = min(num_blocks * BLOCK_TOKENS, request.num_tokens - 1)
        return cached

    def _enqueue(self, request: Request, ask: Ask, prefill: int, decode: int) -> None:
        model = self._workers[prefill].model
        load_s = model.per_token_s + model.per_context_s * request.num_tokens
        output = ask.expected_output
        held = (request.num_tokens + output / 2) / self._workers[decode].hardware.kv_tokens
        request.decode_s = output * max(load_s, held * self._targets.tpot_s)  # of time or KV, the scarcer
        request.load_s = load_s if decode == prefill else 0.0
        request.prefill_at, request.decode_at = prefill, decode
        self._reserve(request)
        self._promise(request)
        self._schedulers[prefill].add(request)
        self._num_queued[prefill] += 1
        self._num_placed += 1
        self._fleet.last_placed[prefill] = self._fleet.last_placed[decode] = self._num_placed
        self._report(prefill)

    def _reserve(self, request: Request) -> None:
        request.is_reserved = True
        self._add_coming(request, 1)

    def _release(self, request: Request) -> None:
        if request.is_reserved:
            request.is_reserved = False
            self._add_coming(request, -1)

    def _add_coming(self, request: Request, sign: int) -> None:
        fleet, decode = self._fleet, request.decode_at
        fleet.coming_rows[decode] += sign
        fleet.coming_context[decode] += sign * request.num_tokens
        if decode != request.prefill_at:
            fleet.kv_promised[decode] += sign * request.num_tokens
            model = self._workers[decode].model
            load_s = model.per_token_s + model.per_context_s * request.num_tokens
            fleet.far_load_s[decode] += sign * load_s

    def _promise(self, request: Request) -> None:
        """KV where it is computed, until the prompt begins and holds it."""
        request.is_promised = True
        self._fleet.kv_promised[request.prefill_at] += request.num_tokens

    def _unpromise(self, request: Request) -> None:
        if request.is_promised:
            request.is_promised = False
            self._fleet.kv_promised[request.prefill_at] -= request.num_tokens

    def _report(self, index: int) -> None:
        fleet, scheduler = self._fleet, self._schedulers[index]
        if not self._num_queued[index]:  # what the last plan found is no more
            fleet.work_s[index] = fleet.queued_load_s[index] = fleet.late_s[index] = 0.0
            return
        fleet.work_s[index] = scheduler.work_s
        fleet.queued_load_s[index] = scheduler.load_s
        fleet.late_s[index] = scheduler.late_s

    def plan(self, worker: Worker, now: float) -> Plan:
        scheduler, batch, yielding = self._schedulers[worker.index], worker.batch, worker.yielding
        slack_s = worker.slack_s(now, self._targets.tpot_s)
        decode = DecodeBatch(
            batch.rows,
            batch.context,
            step_budget_s(self._targets, slack_s, self._scheduling, self._lengths.mean),
            num_yielding=yielding.rows,
            yielding_context=yielding.context,
            life_s=self._life_s,
            longest_s=self._targets.gap_s * self._scheduling.gap_safety,
            bearable_s=self._bearable_s(worker, now),
        )
        reserve = round(LATE_RESERVE * worker.hardware.kv_tokens)
        room = worker.kv_room - self._growth * worker.rows if worker.kv_used else worker.kv_room
        step = scheduler.plan(now, decode, room, reserve if worker.kv_used else 0)
        for request in scheduler.newly_late:
            self._release(request)
            self._unpromise(request)
        self._report(worker.index)
        return Plan(step.chunks, step.num_yielding > 0)

    def _bearable_s(self, worker: Worker, now: float) -> float:
        if not worker.model.mixed_s:
            return 0.0  # nobody asks
        return bearable_s(worker.slacks_s(now, self._targets.tpot_s), self._scheduling)

    def is_waiting(self, worker: Worker) -> bool:
        return self._num_queued[worker.index] > 0

    def decode_worker(self, request: Request, worker: Worker, now: float) -> int:
        self._unpromise(request)
        self._count(worker)
        if not request.is_reserved:
            request.decode_at = choose_decode(
                self._fleet, self._ask(request), worker.index, self._targets, self._settings, 0.0
            )
            self._reserve(request)
        return request.decode_at

    def prefilled(self, request: Request, worker: Worker, now: float) -> None:
        self._schedulers[worker.index].remove(request)
        self._num_queued[worker.index] -= 1
        if not self._num_queued[worker.index]:
            self._report(worker.index)
        if request.decode_at == worker.index:
            self.num_local += 1
        else:
            self.num_moved += 1

    def joined(self, request: Request, worker: Worker) -> None:
        self._release(request)
        self._count(worker)

    def ended(self, request: Request, worker: Worker) -> None:
        self._release(request)
        self._lengths.add(request.num_prompt, request.num_output)
        if (own := self._dedication) is None or not own.has_price:
            return
        num_running, context = float(self._fleet.rows.sum()), float(self._fleet.context.sum())
        if own.ended(request.num_prompt, request.num_output, num_running, context):
            self._dedicate(own.num_prefill)

    def _dedicate(self, num_prefill: int | None) -> None:
        fleet, count = self._fleet, len(self._workers)
        price_s = self._workers[0].model.mixed_s
        if num_prefill is None:
            self._prefilling = None
            fleet.can_prefill[:] = fleet.can_decode[:] = True
            fleet.set_prices(price_s)
            return
        self._prefilling = assigned(num_prefill, fleet.rows.tolist(), self._prefilling or [False] * count)
        fleet.can_prefill[:] = self._prefilling
        fleet.can_decode[:] = ~fleet.can_prefill
        fleet.set_prices(np.where(fleet.can_prefill, price_s, 0.0))  # who only decodes never pays

    def preempted(self, request: Request, worker: Worker, now: float) -> int:
        request.num_computed = 0
        self._enqueue(request, self._ask(request), worker.index, worker.index)
        return worker.index

    def stepped(self, worker: Worker) -> None:
        self._count(worker)

    def _count(self, worker: Worker) -> None:
        fleet, index = self._fleet, worker.index
        fleet.rows[index] = worker.batch.rows
        fleet.context[index] = worker.batch.context
        fleet.kv_used[index] = worker.kv_used

    def facts(self) -> dict[str, Any]:
        return {"num_local": self.num_local, "num_moved": self.num_moved}
