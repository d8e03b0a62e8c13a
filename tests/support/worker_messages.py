"""Short ways to write the messages and events of worker tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cluster.engine.batch import StepOutput, StepPlan
from cluster.ids import Attempt, Epoch, LeaseId, RequestId, RouterId, WorkerId
from cluster.sampling import SamplingParams, TokenOutput
from cluster.wire.messages import Prefill, Reserve, SloTargets
from cluster.worker_io import Action, FromRouter, Peer, RunStep, StepDone, ToPeer, ToRouter

ROUTER = RouterId("router-0")
D = Peer(WorkerId("decode-0"), Epoch(1))
P = Peer(WorkerId("prefill-0"), Epoch(1))
R1 = RequestId("r1")
R2 = RequestId("r2")
A1 = Attempt(1)

T = TypeVar("T")


def prefill(
    token_ids: list[int],
    *,
    request: str = "r1",
    attempt: int = 1,
    skip: int = 0,
    params: SamplingParams | None = None,
    router: RouterId = ROUTER,
    decode: Peer = D,
    slo: SloTargets | None = None,
) -> FromRouter:
    message = Prefill(
        request=RequestId(request),
        attempt=Attempt(attempt),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=params or SamplingParams(max_tokens=10),
        cache_salt="",
        decode_worker=decode.worker,
        decode_epoch=decode.epoch,
        kv_address="addr",
        lease=LeaseId(1),
        skip_tokens=skip,
        slo=slo,
    )
    return FromRouter(router, message)


def reserve(
    token_ids: list[int],
    *,
    request: str = "r1",
    attempt: int = 1,
    local: bool = False,
    params: SamplingParams | None = None,
    ttl_s: float = 10.0,
    router: RouterId = ROUTER,
    num_prompt_tokens: int | None = None,
    slo: SloTargets | None = None,
) -> FromRouter:
    message = Reserve(
        request=RequestId(request),
        attempt=Attempt(attempt),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=params or SamplingParams(max_tokens=10),
        cache_salt="",
        lease_ttl_s=ttl_s,
        local=local,
        slo=slo,
    )
    return FromRouter(router, message)


def to_router(actions: Sequence[Action], kind: type[T]) -> list[T]:
    """The messages of this kind that go to routers."""
    return [a.message for a in actions if isinstance(a, ToRouter) and isinstance(a.message, kind)]


def to_peer(actions: Sequence[Action], kind: type[T]) -> list[T]:
    """The messages of this kind that go to peers."""
    return [a.message for a in actions if isinstance(a, ToPeer) and isinstance(a.message, kind)]


def only(actions: Sequence[Action], kind: type[T]) -> T:
    """The one action of this kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, (kind.__name__, actions)
    return found[0]


def plan_of(actions: Sequence[Action]) -> StepPlan | None:
    plans = [action.plan for action in actions if isinstance(action, RunStep)]
    assert len(plans) <= 1
    return plans[0] if plans else None


def step_done(plan: StepPlan, token: int = 5) -> StepDone:
    """Every row that samples gets this token."""
    outputs = tuple(None if row.sample is None else TokenOutput(token) for row in plan.rows)
    return StepDone(StepOutput(outputs, compute_s=0.01))
