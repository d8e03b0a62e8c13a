"""A recorded load in the simulated pool: the same arrivals and lengths, the live policy, measured steps.

Steps run one by one. One takes what such steps took at that time of the load, live, more or less: as far from
it as they were. Router and scheduler know what they take in the middle, as they do live.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.against_live.measured import MeasuredWorker, World
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Plan, Simulation
from bench.simulator.fleet.worker import Worker
from bench.simulator.hardware import Hardware
from cluster.engine.pacing import live_settings
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.step_model import StepWork

MOST_CHUNK_TOKENS = 512  # of a step, by default
_DRAIN_S = 1e5
_TOKEN_BYTES = 1  # bytes of a token: links are given in tokens per second


class Clock:
    """Of a simulation, once there is one."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None

    @property
    def now(self) -> float:
        return 0.0 if self.simulation is None else self.simulation.now


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Seconds of a step that begins now; `bench.simulator.hardware.StepTimes`."""

    measured: MeasuredWorker
    clock: Clock
    rng: random.Random

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float:
        work = StepWork(num_rows + num_chunk_tokens, context, attention)
        return self.measured.step_s(work, self.clock.now, self.rng)

    def growth_s(self, num_rows: int, context: int) -> float:
        return self.measured.model_at(self.clock.now).per_context_s * num_rows


class StepByStep(ElasticPolicy):
    """As a live router and its workers, each step planned anew: how long it takes changes."""

    def __init__(
        self, targets: Targets, measured: Sequence[MeasuredWorker], history: Sequence[tuple[int, int]]
    ) -> None:
        """`history`: (prompt, answer) of requests that have ended."""
        super().__init__(
            targets,
            scheduling=live_settings(targets, MOST_CHUNK_TOKENS),
            use_prefix_cache=False,
            roles=[one.role for one in measured],
        )
        self._measured = measured
        for num_prompt, num_output in history:
            self._lengths.add(num_prompt, num_output)

    def is_waiting(self, worker: Worker) -> bool:
        return True

    def arrive(self, request: Request, now: float) -> int | None:
        for worker in self._workers:
            self._tell(worker, now)
        return super().arrive(request, now)

    def plan(self, worker: Worker, now: float) -> Plan:
        self._tell(worker, now)
        return super().plan(worker, now)

    def _tell(self, worker: Worker, now: float) -> None:
        """How long its steps take by now."""
        model = self._measured[worker.index].model_at(now)
        if model is not worker.model:
            worker.model = self._schedulers[worker.index].model = model
            self._fleet.set_model(worker.index, model)


@dataclass(frozen=True, slots=True)
class Answer:
    """As a client would have seen it; `tpot_s` None: one token."""

    ttft_s: float
    tpot_s: float | None
    is_local: bool


def replay(
    world: World,
    arrivals: Sequence[tuple[float, int, int]],
    block_size: int,
    history: Sequence[tuple[int, int]] = (),
    targets: Targets = DEFAULT_TARGETS,
) -> list[Answer]:
    """Of each arrival (when, prompt tokens, answer tokens), in order; all are served. `history`: see
    `StepByStep`."""
    clock = Clock()
    pool = [
        Hardware(
            one.role.value,
            one.model_at(0.0),
            one.num_blocks * block_size,
            _TOKEN_BYTES,
            world.tokens_s,
            times=MeasuredTimes(one, clock, random.Random(index)),
        )
        for index, one in enumerate(world.workers)
    ]
    policy = StepByStep(targets, world.workers, history)
    requests = [Request(index, *arrival) for index, arrival in enumerate(arrivals)]
    simulation = Simulation(pool, requests, policy, targets.tpot_s, use_prefix_cache=False)
    clock.simulation = simulation
    simulation.run(requests[-1].arrival_s + _DRAIN_S)
    return [_answer(request, world) for request in requests]


def _answer(request: Request, world: World) -> Answer:
    assert request.first_s is not None, "nobody is turned away here"
    assert request.finish_s is not None, "the run drains"
    tpot_s = None
    if request.num_output > 1:
        tpot_s = (request.finish_s - request.first_s + world.tail_s) / (request.num_output - 1)
    ttft_s = request.first_s - request.arrival_s + world.front_s
    return Answer(ttft_s, tpot_s, request.prefill_at == request.decode_at)
