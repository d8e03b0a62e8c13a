"""A recorded load in the simulated pool: the same arrivals and lengths, the live policy, measured steps.

Steps run one by one. One that begins while another worker computes takes what such steps took when that was
measured; what changes while it runs does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.against_live.measured import MeasuredWorker, World
from bench.simulator.fleet.elastic import ElasticPolicy
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.simulation import Simulation
from bench.simulator.fleet.worker import Worker
from bench.simulator.hardware import Hardware
from cluster.engine.pacing import live_settings
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.step_model import StepWork
from cluster.wire.messages import Role

MOST_CHUNK_TOKENS = 512  # of a step, by default
_DRAIN_S = 1e5
_TOKEN_BYTES = 1  # bytes of a token: links are given in tokens per second


class Neighbours:
    """Who computes beside whom, once the workers are known."""

    def __init__(self) -> None:
        self.workers: Sequence[Worker] = ()

    def compute_beside(self, index: int) -> bool:
        return any(worker.is_busy for worker in self.workers if worker.index != index)


@dataclass(frozen=True, slots=True)
class SharedTimes:
    """Seconds of a step; `bench.simulator.hardware.StepTimes`."""

    index: int
    measured: MeasuredWorker
    neighbours: Neighbours

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float:
        measured = self.measured
        model = measured.beside if self.neighbours.compute_beside(self.index) else measured.alone
        return model.step_s(StepWork(num_rows + num_chunk_tokens, context, attention))

    def growth_s(self, num_rows: int) -> float:
        return self.measured.alone.per_context_s * num_rows


class StepByStep(ElasticPolicy):
    """As a live router and its workers, each step planned anew: how long it takes depends on the others."""

    def __init__(self, targets: Targets, roles: Sequence[Role], history: Sequence[tuple[int, int]]) -> None:
        """`history`: (prompt, answer) of requests that have ended."""
        super().__init__(
            targets,
            scheduling=live_settings(targets, MOST_CHUNK_TOKENS),
            use_prefix_cache=False,
            roles=roles,
        )
        for num_prompt, num_output in history:
            self._lengths.add(num_prompt, num_output)

    def is_waiting(self, worker: Worker) -> bool:
        return True


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
    neighbours = Neighbours()
    pool = [
        Hardware(
            one.role.value,
            one.beside,
            one.num_blocks * block_size,
            _TOKEN_BYTES,
            world.tokens_s,
            times=SharedTimes(index, one, neighbours),
        )
        for index, one in enumerate(world.workers)
    ]
    policy = StepByStep(targets, [one.role for one in world.workers], history)
    requests = [Request(index, *arrival) for index, arrival in enumerate(arrivals)]
    simulation = Simulation(pool, requests, policy, targets.tpot_s, use_prefix_cache=False)
    neighbours.workers = simulation.workers
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
