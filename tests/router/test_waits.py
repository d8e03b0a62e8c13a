"""What a router predicts of a late prompt's wait is what the worker's own scheduler does."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from cluster.engine.pacing import live_settings
from cluster.slo_classes import DEFAULT_TARGETS, DecodeBatch, prefill_s
from cluster.slo_schedule import SloScheduler, step_budget_s
from cluster.step_model import StepModel, StepWork, chunk_attention
from router.elastic import Ask, ElasticSettings, Place, TurnAway, place
from router.fleet import Fleet

SMALL = StepModel(25e-3, 0.0, 2e-3, 0.0, 0.0)  # two cores
MIDDLE = StepModel(2e-3, 12e-3, 2e-4, 1e-7, 1e-8)
TARGETS = DEFAULT_TARGETS
PROMPT = 256


@dataclass(eq=False)
class Waiting:
    deadline_s: float
    num_tokens: int = PROMPT
    num_computed: int = 0
    decode_s: float = 1.0
    load_s: float = 0.0
    new_kv_tokens: int = 0
    is_batch: bool = False


def computed_s(model: StepModel, rows: int, num_yielding: int, num_late: int) -> float:
    """How long the worker takes for so many late prompts, its batch unchanging."""
    settings = live_settings(TARGETS, 512)
    scheduler: SloScheduler[Waiting] = SloScheduler(model, TARGETS, settings)
    for index in range(num_late):
        scheduler.add(Waiting(-1.0 + index / 1000))
    now = yielded_at = 0.0
    while len(scheduler):
        batch = DecodeBatch(
            rows,
            rows * 300,
            step_budget_s(TARGETS, TARGETS.tpot_s, settings) if rows else None,
            num_yielding=num_yielding,
            yielding_context=num_yielding * 300,
            paused_s=now - yielded_at,
        )
        plan = scheduler.plan(now, batch, 10**9)
        tokens = rows + plan.num_yielding + sum(count for _, count in plan.chunks)
        attention = sum(chunk_attention(one.num_computed, count) for one, count in plan.chunks)
        context = 300 * (rows + plan.num_yielding)
        now += model.step_s(StepWork(tokens, context, attention))
        if plan.num_yielding == num_yielding:
            yielded_at = now
        for prompt, count in plan.chunks:
            prompt.num_computed += count
            if prompt.num_computed == prompt.num_tokens:
                scheduler.remove(prompt)
    return now


def predicted_s(model: StepModel, rows: int, num_yielding: int, num_late: int) -> float:
    fleet = Fleet([model], [1e6], [1e9])
    fleet.rows[:], fleet.context[:] = rows, rows * 300
    fleet.yield_s[:] = num_yielding * (model.per_token_s + 300 * model.per_context_s)
    fleet.late_s[:] = (num_late - 1) * prefill_s(model, PROMPT, 0)
    late = msgspec.structs.replace(TARGETS, ttft_s=0.0)  # it is late already
    decision = place(fleet, Ask(PROMPT, 100.0), late, ElasticSettings())
    assert isinstance(decision, Place)
    return decision.ttft_s


@pytest.mark.parametrize("model", [SMALL, MIDDLE])
@pytest.mark.parametrize("rows", [0, 5, 20, 30, 60])
@pytest.mark.parametrize("num_yielding", [0, 4, 16, 40])
def test_the_wait_of_a_late_prompt_is_predicted_as_it_is_computed(
    model: StepModel, rows: int, num_yielding: int
) -> None:
    waited_s = computed_s(model, rows, num_yielding, 12)
    assert predicted_s(model, rows, num_yielding, 12) == pytest.approx(waited_s, rel=0.5)


def test_a_measured_rate_is_believed_where_it_is_higher() -> None:
    fleet = Fleet([SMALL], [1e6], [1e9])
    fleet.rows[:], fleet.late_s[:], fleet.work_s[:] = 40, 10.0, 2.0  # its rows fill a step
    ask = Ask(PROMPT, 100.0, max_wait_s=60.0)
    slow = place(fleet, ask, TARGETS, ElasticSettings())
    assert isinstance(slow, TurnAway)
    fleet.late_rate[:] = 0.25
    fast = place(fleet, ask, TARGETS, ElasticSettings())
    assert isinstance(fast, Place)
    assert fast.ttft_s == pytest.approx((12.0 + 0.512) / 0.25, rel=0.05)


def test_whoever_comes_again_when_told_to_is_let_in() -> None:
    fleet = Fleet([SMALL], [1e6], [1e9])
    fleet.rows[:], fleet.late_s[:], fleet.work_s[:] = 12, 60.0, 2.0
    ask = Ask(PROMPT, 100.0, max_wait_s=60.0)
    told = place(fleet, ask, TARGETS, ElasticSettings())
    assert isinstance(told, TurnAway)
    assert told.retry_after_s is not None
    left = 1 - (25e-3 + 12 * 2e-3) / (0.1 * 0.985)
    fleet.late_s[:] -= 1.001 * told.retry_after_s * left  # drained meanwhile
    assert isinstance(place(fleet, ask, TARGETS, ElasticSettings()), Place)
