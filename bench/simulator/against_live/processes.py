"""A recorded load in the simulator of whole processes: the live router and the live cores of the workers, in
virtual time, with measured steps. The other simulator (`replay`) has the live policies and schedulers, but a
worker's batch as counts and sums: where the two differ, that is why.

1. A router and the workers of the world start; each worker is told the model it would have calibrated.
2. One request warms the edges up; then the recorded arrivals come.
3. What a step takes is as in `replay`; workers fit their models to it as they run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulator.against_live.measured import MeasuredWorker, World
from bench.simulator.against_live.replay import Answer
from bench.simulator.clients import Caller, Workload
from bench.simulator.decode_process import DecodeProcess
from bench.simulator.hardware import HANDOFF_S
from bench.simulator.model import VOCABULARY
from bench.simulator.prefill_process import PrefillProcess
from bench.simulator.router_process import RouterProcess
from bench.simulator.scenario import BLOCK_BYTES, Scenario
from bench.simulator.site import Site
from bench.simulator.worker_process import WorkerProcess
from cluster.engine.batch import StepPlan
from cluster.errors import BatonError
from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import SamplingParams
from cluster.step_model import StepWork, chunk_attention
from cluster.wire.messages import Role
from cluster.worker_io import Calibrated
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from router.conductor_io import Lifecycle
from router.config import ConductorConfig
from router.delivery import Delivery, Failed

_START_S = 1.0
_LONGEST_S = 3_600.0
_DELAY_S = 1e-4  # of a message; what messages take is in `World.front_s`


class _Measured(WorkerProcess):
    """Steps take what was measured at that time of the load."""

    measured: MeasuredWorker
    begin_s: float  # of the load
    noise: random.Random

    def _compute(self, plan: StepPlan) -> None:
        seconds = self.measured.step_s(work_of(plan), self.queue.now - self.begin_s, self.noise)
        self.later(seconds, self._end_step, plan, seconds)

    def _telling_s(self, compute_s: float) -> float:
        """It is in what steps were measured to take."""
        return 0.0


class _Decode(_Measured, DecodeProcess):
    pass


class _Prefill(_Measured, PrefillProcess):
    pass


def work_of(plan: StepPlan) -> StepWork:
    """A row of one token with a sample decodes; all others are chunks."""
    context, attention = 0, 0.0
    for row in plan.rows:
        if len(row.token_ids) == 1 and row.sample is not None:
            context += row.start + 1
        else:
            attention += chunk_attention(row.start, len(row.token_ids))
    return StepWork(plan.num_tokens, context, attention)


@dataclass(slots=True)
class _Call:
    sent_s: float
    num_output: int
    first_s: float | None = None
    last_s: float | None = None
    is_local: bool = True
    error: BatonError | None = None


class _Caller(Caller):
    """One request."""

    def __init__(self, site: Site, workload: Workload, call: _Call) -> None:
        super().__init__(site, workload, 0)
        self.call = call

    def deliver(self, delivery: Delivery) -> None:
        if isinstance(delivery, Failed):
            self.call.error = delivery.error
        elif delivery.outputs:
            self.call.last_s = self._site.queue.now
            if self.call.first_s is None:
                self.call.first_s = self._site.queue.now

    def lifecycle(self, life: Lifecycle) -> None:
        if life.event is LifecycleEvent.PLACED:
            assert self.router is not None
            attempt = self.router.conductor._requests[self.request].attempt
            assert attempt is not None
            self.call.is_local = attempt.prefill is None

    def ended(self) -> None:
        pass


def replay_processes(
    world: World, arrivals: Sequence[tuple[float, int, int]], block_size: int
) -> list[Answer]:
    """As `replay`.

    Raises:
        BatonError: a request failed in the simulation.
    """
    site = Site(_scenario(world, arrivals, block_size))
    workload = Workload(site, site.queue.stop)
    router = RouterProcess(site, 0, Epoch(1))
    site.routers.append(router)
    begin_s = 2 * _START_S + 10.0
    for index, measured in enumerate(world.workers):
        kind: Any = _Decode if measured.role is Role.DECODE else _Prefill
        worker: _Measured = kind(site, WorkerId(f"{measured.role.value}-{index}"), Epoch(1))
        worker.measured, worker.begin_s, worker.noise = measured, begin_s, random.Random(index)
        site.add(worker)
        worker.start()
        worker.dispatch(Calibrated(measured.model_at(0.0)))
    site.queue.run(_START_S)
    rng = random.Random("prompts")
    calls = []

    def send(num_prompt: int, num_output: int) -> None:
        calls.append(_Call(site.queue.now, num_output))
        spec = RequestSpec(
            request=RequestId(f"r{len(calls)}"),
            token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(num_prompt)),
            sampling=SamplingParams(max_tokens=num_output),
        )
        _Caller(site, workload, calls[-1]).send(router, spec)

    send(32, 8)
    for at_s, num_prompt, num_output in arrivals:
        site.queue.at(begin_s + at_s, send, num_prompt, num_output)
    site.queue.run(begin_s + arrivals[-1][0] + _LONGEST_S)
    return [_answer(call, world) for call in calls[1:]]


def _scenario(world: World, arrivals: Sequence[tuple[float, int, int]], block_size: int) -> Scenario:
    blocks = {role: sum(one.num_blocks for one in world.workers if one.role is role) for role in Role}
    longest = max(num_prompt for _, num_prompt, _ in arrivals)
    moved_s = longest / world.tokens_s / -(-longest // block_size)
    return Scenario(
        seed=0,
        num_requests=len(arrivals) + 2,
        num_clients=0,
        think_s=0.0,
        num_routers=1,
        num_prefill=sum(one.role is Role.PREFILL for one in world.workers),
        num_decode=sum(one.role is Role.DECODE for one in world.workers),
        in_place=True,
        block_size=block_size,
        prefill_blocks=blocks[Role.PREFILL],
        decode_blocks=blocks[Role.DECODE],
        max_prompt_tokens=max(longest, 32),
        max_new_tokens=max(num_output for _, _, num_output in arrivals),
        prefill=PrefillConfig(block_bytes=BLOCK_BYTES),
        decode=DecodeConfig(block_bytes=BLOCK_BYTES),
        conductor=ConductorConfig(),
        delay_s=_DELAY_S,
        block_s=max(moved_s, HANDOFF_S / 100),
    )


def _answer(call: _Call, world: World) -> Answer:
    if call.error is not None:
        raise BatonError(f"a replayed request failed: {call.error}")
    assert call.first_s is not None, "it is over"
    assert call.last_s is not None, "it is over"
    tpot_s = None
    if call.num_output > 1:
        tpot_s = (call.last_s - call.first_s + world.tail_s) / (call.num_output - 1)
    return Answer(call.first_s - call.sent_s + world.front_s, tpot_s, call.is_local)
