"""The load of a decode batch, and what its streams leave for chunks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.engine.pace import Pace
from cluster.engine.sequence import Sequence
from cluster.ids import Attempt, RequestId, RouterId
from cluster.sampling import SamplingParams
from cluster.slo_classes import DecodeBatch, Targets
from cluster.slo_schedule import SloSettings
from cluster.step_model import StepModel
from decode_worker.batch_load import Lives, decode_batch

MODEL = StepModel(2e-3, 12e-3, 1e-3, 1e-6, 1e-8)
SETTINGS = SloSettings()


def row(
    length: int, tpot_s: float = 0.1, *, gap_s: float = math.inf, first_s: float = 0.0, is_batch: bool = False
) -> Sequence:
    pace = Pace(Targets(2.0, tpot_s, gap_s), due_s=2.0, is_batch=is_batch)
    params = SamplingParams(max_tokens=500)
    tokens = [1] * (length - 1)
    sequence = Sequence(
        RouterId("r"), RequestId("q"), Attempt(1), tokens, len(tokens), params, "", 1, 0.0, pace
    )
    sequence.append(5)
    pace.first_token(first_s)
    return sequence


def batch(*rows: Sequence, now: float = 0.0) -> DecodeBatch:
    return decode_batch(rows, now, MODEL, SETTINGS)


def test_the_tightest_stream_sets_the_budget() -> None:
    found = batch(row(100, 0.2), row(50, 0.05), row(70, 0.1))
    assert (found.num_rows, found.context) == (3, 220)
    assert found.budget_s == pytest.approx(0.05 * 0.985)
    assert found.target_s == pytest.approx(0.05 * 0.985)


def test_a_stream_with_a_looser_target_may_be_the_tightest() -> None:
    found = batch(row(10, 0.08), row(10, 0.1, first_s=-0.5))  # half a second behind
    assert found.budget_s == pytest.approx(0.0985 / 2)
    assert found.target_s == pytest.approx(0.08 * 0.985)
    assert found.bearable_s == pytest.approx(-0.4)  # it was due then


def test_of_many_streams_a_few_may_be_left_behind() -> None:
    leading = [row(10, first_s=0.01 * index) for index in range(1, 20)]
    hopeless = row(100, 0.010)
    assert batch(row(10), *leading, hopeless).bearable_s == pytest.approx(0.1 + 0.02)


def test_rows_that_yield_have_no_say() -> None:
    found = batch(
        row(100, 0.02, is_batch=True), row(40, 0.02, first_s=3.0), row(30, 0.1, first_s=3.0), now=3.5
    )
    assert (found.num_rows, found.num_yielding, found.yielding_context) == (0, 3, 170)
    assert (found.budget_s, found.target_s) == (None, None)
    assert found.paused_s == 3.5


def test_a_target_that_no_step_could_meet_has_no_say() -> None:
    assert batch(row(100, 0.010)).budget_s is None
    assert batch(row(20_000, 0.03)).budget_s is None  # its own keys take longer
    found = batch(row(100, 0.010), row(100, 0.05))
    assert (found.num_rows, found.target_s) == (2, 0.05 * 0.985)


def test_where_answers_are_short_a_lag_is_made_up_for_at_once() -> None:
    late = row(10, first_s=-0.03)
    settings = replace(SETTINGS, lag_share=1 / 16)
    slow = decode_batch([late], 0.0, MODEL, settings, mean_output=400)
    quick = decode_batch([late], 0.0, MODEL, settings, mean_output=15)
    assert slow.budget_s == pytest.approx(0.0985 - 0.1 * 0.03)
    assert quick.budget_s == pytest.approx(0.0985 - 0.03)


def test_nobody_leaves_all_the_time() -> None:
    assert batch() == DecodeBatch()


def test_lives_are_smoothed_and_answers_cost_time_or_kv() -> None:
    lives = Lives()
    assert math.isinf(lives.mean_s)
    lives.ended(row(10), 4.0)
    lives.ended(row(10), 14.0)
    assert lives.mean_s == pytest.approx(5.0)
    assert 100 < lives.mean_output < 128
    one = row(1000)
    by_time = lives.decode_s(one, MODEL, 10**9)
    assert by_time == pytest.approx(lives.mean_output * (1e-3 + 1e-6 * 1000))
    assert lives.decode_s(one, MODEL, 2_000) > 10 * by_time  # it holds half the pool
