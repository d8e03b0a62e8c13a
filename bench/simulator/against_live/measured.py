"""The world of a replay: what a recording measured of its machine, before and apart from the loads compared.

Three short phases measure it, on the same cluster, with requests of their own:

- `prompts`, one request at a time, answers of one token: how long a worker's steps take while the others
  rest, and what a first token takes beside its prefill (client, HTTP, router, messages): `front_s`.
- `decode`, several requests with short prompts and long answers: decode alone, and the end of an answer
  after its last token: `tail_s`.
- `both`, more requests than are served at once: each worker's steps while the others compute too. Workers of
  one machine share its memory's bandwidth, and one that rests lends its cores, so that is another model. Also
  the hand-off of a prompt computed elsewhere.

A worker alone has one model, that of the end of `both`: it knows all kinds of steps by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import msgspec

from bench.simulator.against_live.recording import Phase, Recording, WorkerSeen
from bench.simulator.hardware import HANDOFF_S
from cluster.errors import BatonError
from cluster.step_model import StepModel
from cluster.wire.messages import Role

PROMPTS, DECODE, BOTH = "prompts", "decode", "both"
MOST_OTHERS = 0.25  # cores that others may use while the machine is measured
_LEAST_S = 1e-5  # of a transfer


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """`alone`: its steps while all others rest; `beside`: while one of them computes."""

    role: Role
    alone: StepModel
    beside: StepModel
    num_blocks: int


@dataclass(frozen=True, slots=True)
class World:
    """`tokens_s`: of KV, from one worker to another."""

    workers: tuple[MeasuredWorker, ...]
    front_s: float
    tail_s: float
    tokens_s: float


def world_of(recording: Recording) -> World:
    """
    Raises:
        BatonError: a phase that measures the machine is missing, or says nothing of it.
    """
    for name in (PROMPTS, DECODE, BOTH):
        if name not in recording.measuring:
            raise BatonError(
                f"the recording of `{recording.layout}` lacks its phase `{name}`: record it again"
            )
        check(recording.measuring[name])
    prompts, decode, both = (recording.measuring[name] for name in (PROMPTS, DECODE, BOTH))
    is_alone = len(both.workers) == 1
    workers = []
    for last in both.workers:
        role = Role(last.role)
        alone = last if is_alone else _of(last, decode if role is Role.DECODE else prompts)
        model = _whole(alone.step_model, last.step_model)
        workers.append(MeasuredWorker(role, model, last.step_model, last.num_blocks))
    return World(
        workers=tuple(workers),
        front_s=median(one.ttft_s - one.prefill_s for one in prompts.requests),
        tail_s=median(one.tail_s for one in decode.requests),
        tokens_s=_tokens_s(both),
    )


def _whole(alone: StepModel, beside: StepModel) -> StepModel:
    """What the phase alone had no steps to tell (decode has no chunks) is as it is beside others."""
    told = {name: getattr(alone, name) for name in ("per_token_s", "per_context_s", "per_attention_s")}
    missing = {name: getattr(beside, name) for name, value in told.items() if value <= 0}
    return msgspec.structs.replace(alone, **missing)


def check(phase: Phase) -> None:
    """
    Raises:
        BatonError: others used the machine meanwhile, or the steps that ran follow no model.
    """
    others = phase.others_cores + phase.stolen_cores
    if others > MOST_OTHERS:
        raise BatonError(
            f"others used {others:.2f} cores while `{phase.load.name}` ran: "
            "record it again when the machine is quiet"
        )
    for worker in phase.workers if phase.load.name == BOTH else ():
        model = worker.step_model
        if model.per_token_s <= 0 or model.fixed_s + model.floor_s <= 0:
            raise BatonError(
                f"the steps of {worker.worker} in `{phase.load.name}` follow no model "
                f"({model.per_token_s:.1e} s per token): record it again when the machine is quiet"
            )


def _of(worker: WorkerSeen, phase: Phase) -> WorkerSeen:
    return next(one for one in phase.workers if one.worker == worker.worker)


def _tokens_s(phase: Phase) -> float:
    """So that the median prompt takes the median time."""
    moved = [one for one in phase.requests if not one.is_local]
    if not moved:
        return 1 / _LEAST_S
    took_s = median(one.transfer_s for one in moved)
    return median(one.input_tokens for one in moved) / max(took_s - HANDOFF_S, _LEAST_S)
