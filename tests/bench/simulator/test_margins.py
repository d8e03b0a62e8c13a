"""A full pair in the simulator of whole processes: what lags and errors of steps cost, and that workers leave
room for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from bench.simulator.against_live.measured import MeasuredWorker, World, spread
from bench.simulator.against_live.processes import replay_processes
from bench.simulator.against_live.replay import Answer
from cluster.engine import pacing
from cluster.slo_budget import SloSettings
from cluster.slo_classes import DEFAULT_TARGETS, Targets
from cluster.step_model import StepModel
from cluster.wire.messages import Role

DECODER = StepModel(11e-3, 0.0, 0.8e-3, 0.7e-6, 3.6e-8)
PREFILLER = StepModel(6e-3, 4e-3, 1.1e-3, 0.8e-6, 4.5e-8)


def world(error_p90: float) -> World:
    """A pair as it was on two cores, near saturation."""
    decoder = MeasuredWorker(Role.DECODE, 728, ((0.0, DECODER, spread(error_p90)),))
    prefiller = MeasuredWorker(Role.PREFILL, 364, ((0.0, PREFILLER, spread(error_p90 / 2)),))
    return World((decoder, prefiller), front_s=0.006, tail_s=0.003, tokens_s=12_000.0)


def arrivals(seed: int) -> list[tuple[float, int, int]]:
    """Short prompts and answers, as many as the pair bears."""
    rng, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(20.0)) < 20.0:
        num_prompt = max(4, round(rng.lognormvariate(4.0, 0.8)))
        found.append((at_s, num_prompt, max(2, round(rng.lognormvariate(2.3, 0.7)))))
    return found


def slow_tokens(answers: list[Answer]) -> float:
    """Share of answers that missed the target of a mean time per token."""
    times = [one.tpot_s for one in answers if one.tpot_s is not None]
    return sum(tpot_s > DEFAULT_TARGETS.tpot_s for tpot_s in times) / len(answers)


def in_time(answers: list[Answer]) -> float:
    late = sum(one.ttft_s > DEFAULT_TARGETS.ttft_s for one in answers)
    return 1 - slow_tokens(answers) - late / len(answers)  # at least: some may have missed both


@pytest.fixture
def no_margins(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def leave_out() -> None:
        monkeypatch.setattr(pacing, "with_margins", lambda settings, bias, spread: settings)

    return leave_out


def test_where_steps_err_workers_aim_lower_and_more_answers_are_in_time(
    no_margins: Callable[[], None],
) -> None:
    loads = [arrivals(seed) for seed in range(6)]  # a seed alone says little: a dozen answers decide
    with_room = [replay_processes(world(0.3), load, 32) for load in loads]
    no_margins()
    without = [replay_processes(world(0.3), load, 32) for load in loads]
    assert fmean(map(slow_tokens, with_room)) < 0.7 * fmean(map(slow_tokens, without))
    assert fmean(map(in_time, with_room)) > fmean(map(in_time, without)) + 0.01


def test_where_steps_take_what_is_predicted_nothing_changes(no_margins: Callable[[], None]) -> None:
    load = arrivals(1)
    found = replay_processes(world(0.0), load, 32)
    no_margins()
    assert replay_processes(world(0.0), load, 32) == found


def test_who_waited_for_a_step_in_flight_catches_up_before_a_short_answer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts computed elsewhere begin with a lag of up to a step."""
    load = arrivals(1)
    quick = replay_processes(world(0.0), load, 32)
    settings_of = pacing.live_settings

    def slowly(targets: Targets, most: int) -> SloSettings:
        return replace(settings_of(targets, most), lag_share=1.0)

    monkeypatch.setattr(pacing, "live_settings", slowly)
    slow = replay_processes(world(0.0), load, 32)
    assert slow_tokens(quick) < 0.75 * slow_tokens(slow)
    assert in_time(quick) > in_time(slow) + 0.01
