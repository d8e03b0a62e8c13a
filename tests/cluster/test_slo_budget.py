"""Where steps with rows and chunks cost more than both: time is lent to one that is worth it, or none is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.slo_budget import SloSettings, aim_s, bearable_s, lent_budget_s, step_budget_s
from cluster.slo_classes import DecodeBatch, Targets
from cluster.step_model import StepModel, StepWork

MODEL = StepModel(19e-3, 3e-3, 0.1e-3, 0.7e-6, 1e-8, mixed_s=20e-3)
SETTINGS = SloSettings()
TPOT_S = 0.06
ALONE_S = MODEL.step_s(StepWork(20, 16_000))  # 33.2 ms


def lent_s(budget_s: float, work_s: float = 1.0, settings: SloSettings = SETTINGS, **given: float) -> float:
    decode = DecodeBatch(20, 16_000, budget_s, **given)  # type: ignore[arg-type]
    return lent_budget_s(MODEL, decode, budget_s, TPOT_S, work_s, settings)


def test_a_step_that_pays_the_price_takes_as_long_as_all_streams_but_a_few_bear() -> None:
    behind_s = TPOT_S - SETTINGS.catch_up * 0.1  # for the tightest stream's sake
    assert lent_s(behind_s, bearable_s=0.3) == 0.3
    assert lent_s(0.35, bearable_s=0.3) == 0.35  # never less than any other step
    assert lent_s(TPOT_S, bearable_s=0.3, longest_s=0.2) == 0.2  # a gap
    assert lent_s(TPOT_S, settings=replace(SETTINGS, longest=2.0), bearable_s=0.3) == 2 * TPOT_S


def test_a_step_without_room_for_chunks_worth_the_price_has_none() -> None:
    least_s = ALONE_S + 20e-3 * (1 + SETTINGS.worth)
    assert lent_s(TPOT_S, bearable_s=least_s - 1e-6) == ALONE_S
    assert lent_s(TPOT_S, bearable_s=least_s + 1e-6) == least_s + 1e-6
    assert lent_s(TPOT_S, work_s=5e-3) == TPOT_S  # 6.8 ms for chunks are left: enough for all that waits
    assert lent_s(ALONE_S / 2) == ALONE_S / 2  # it could not be kept anyway


def test_few_streams_may_be_left_behind() -> None:
    slacks_s = [0.01 * one for one in range(40, 0, -1)]
    assert bearable_s(slacks_s, SETTINGS) == pytest.approx(0.05)  # four of forty are due before
    assert bearable_s(slacks_s[:9], SETTINGS) == pytest.approx(0.32)  # of nine not one may be
    assert bearable_s(slacks_s, replace(SETTINGS, may_lag=0.0)) == pytest.approx(0.01)
    assert bearable_s([], SETTINGS) == 0.0


def test_a_gap_limit_has_a_margin_of_its_own() -> None:
    settings = replace(SETTINGS, safety=0.9, gap_safety=0.8)
    targets = Targets(2.0, 0.1, 0.11)
    assert aim_s(targets, settings) == pytest.approx(0.88 * 0.1)
    assert aim_s(Targets(2.0, 0.1), settings) == pytest.approx(0.09)
    assert step_budget_s(targets, 0.3, settings) == pytest.approx(0.088)  # the lead would allow for more
    assert step_budget_s(targets, 0.1, replace(settings, gap_safety=0.9)) == pytest.approx(0.09)
