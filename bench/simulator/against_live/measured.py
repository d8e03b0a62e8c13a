"""The world of a replay: what a recording measured of its machine.

Two short phases, before the loads, with requests of their own:

- `decode`, several requests with short prompts and long answers: the end of an answer after its last token:
  `tail_s`.
- `both`, prompts and answers, several at a time: how long steps take, to find the capacity that loads are
  shares of; what a first token takes beside its prefill (client, HTTP, router, messages): `front_s`; the
  hand-off of a prompt computed elsewhere: `tokens_s`.

And while a load runs, how long steps take, twice a second, as workers find it out from their own steps, and
how far single steps are from that. The speed of a machine that others use too differs by half between a
minute and the next, as does a worker's whose neighbour computes or lends its cores. What a simulator predicts
is what comes of such steps: who waits, what is computed together, where, and how long that takes.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from bench.simulator.against_live.recording import Phase, Recording
from bench.simulator.hardware import HANDOFF_S
from cluster.errors import BatonError
from cluster.step_model import StepModel, StepWork
from cluster.wire.messages import Role

DECODE, BOTH = "decode", "both"
MOST_OTHERS = 0.25  # cores that others may use while the machine is measured
_LEAST_S = 1e-5  # of a transfer
_P90 = 1.2816  # of a normal distribution


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """`times`: (from when on, how long steps take, the spread of single ones), in order; the first holds
    before, too. A spread is a standard deviation of logarithms."""

    role: Role
    num_blocks: int
    times: tuple[tuple[float, StepModel, float], ...]

    def model_at(self, at_s: float) -> StepModel:
        return self._at(at_s)[1]

    def step_s(self, work: StepWork, at_s: float, rng: random.Random) -> float:
        """Of one step."""
        _, model, spread = self._at(at_s)
        return model.step_s(work) * (math.exp(rng.gauss(0, spread)) if spread else 1.0)

    def _at(self, at_s: float) -> tuple[float, StepModel, float]:
        index = bisect_right(self.times, at_s, key=itemgetter(0))
        return self.times[max(0, index - 1)]


def spread(error_p90: float) -> float:
    """Of steps of which one in ten takes so much longer than the middle one."""
    return math.log1p(max(0.0, error_p90)) / _P90


@dataclass(frozen=True, slots=True)
class World:
    """`tokens_s`: of KV, from one worker to another."""

    workers: tuple[MeasuredWorker, ...]
    front_s: float
    tail_s: float
    tokens_s: float


def world_of(recording: Recording, load: Phase | None = None) -> World:
    """As it was during this load; None: during `both`.

    Raises:
        BatonError: a phase that measures the machine is missing, or says nothing of it.
    """
    for name in (DECODE, BOTH):
        if name not in recording.measuring:
            raise BatonError(
                f"the recording of `{recording.layout}` lacks its phase `{name}`: record it again"
            )
        check(recording.measuring[name])
    decode, both = (recording.measuring[name] for name in (DECODE, BOTH))
    workers = []
    for index, last in enumerate(both.workers):
        moments = () if load is None else load.moments
        if any(len(moment.models) != len(both.workers) for moment in moments):
            raise BatonError(f"workers of `{recording.layout}` came or went during a load: record it again")
        times = [
            (moment.at_s, moment.models[index], spread(moment.errors_p90[index])) for moment in moments
        ] or [(0.0, last.step_model, spread(last.step_error_p90))]
        workers.append(MeasuredWorker(Role(last.role), last.num_blocks, tuple(times)))
    return World(
        workers=tuple(workers),
        front_s=_front_s(both),
        tail_s=median(one.tail_s for one in decode.requests),
        tokens_s=_tokens_s(both),
    )


def is_quiet(phase: Phase) -> bool:
    return phase.others_cores + phase.stolen_cores <= MOST_OTHERS


def check(phase: Phase) -> None:
    """
    Raises:
        BatonError: others used the machine meanwhile, or the steps that ran follow no model.
    """
    if not is_quiet(phase):
        raise BatonError(
            f"others used {phase.others_cores + phase.stolen_cores:.2f} cores while `{phase.load.name}` ran: "
            "record it again when the machine is quiet"
        )
    for worker in phase.workers if phase.load.name == BOTH else ():
        model = worker.step_model
        if model.per_token_s <= 0 or model.fixed_s + model.floor_s <= 0:
            raise BatonError(
                f"the steps of {worker.worker} in `{phase.load.name}` follow no model "
                f"({model.per_token_s:.1e} s per token): record it again when the machine is quiet"
            )


def _front_s(phase: Phase) -> float:
    """Before and after a prompt waits and is computed; the least wait has nobody to wait for."""
    rest_s = median(one.ttft_s - one.queue_s - one.prefill_s for one in phase.requests)
    return rest_s + min(one.queue_s for one in phase.requests)


def _tokens_s(phase: Phase) -> float:
    """So that the median prompt takes the median time."""
    moved = [one for one in phase.requests if not one.is_local]
    if not moved:
        return 1 / _LEAST_S
    took_s = median(one.transfer_s for one in moved)
    return median(one.input_tokens for one in moved) / max(took_s - HANDOFF_S, _LEAST_S)
