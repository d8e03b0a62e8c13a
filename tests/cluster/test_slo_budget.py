"""Where steps with rows and chunks cost more than both: time is lent to one that is worth it, or none is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.slo_budget import SloSettings, aim_s, lent_budget_s, step_budget_s
from cluster.slo_classes import DecodeBatch, Targets
from cluster.step_model import StepModel, StepWork

MODEL = StepModel(19e-3, 3e-3, 0.1e-3, 0.7e-6, 1e-8, mixed_s=20e-3)
SETTINGS = SloSettings()
TPOT_S = 0.06
ALONE_S = MODEL.step_s(StepWork(20, 16_000))  # 33.2 ms


def lent_s(budget_s: float, work_s: float = 1.0, settings: SloSettings = SETTINGS, **given: float) -> float:
    decode = DecodeBatch(20, 16_000, budget_s, **({"life_s": 10.0} | given))  # type: ignore[arg-type]
    return lent_budget_s(MODEL, decode, budget_s, TPOT_S, work_s, settings)


def test_streams_lend_a_share_of_what_they_gain_until_they_end() -> None:
    gain = 1 - ALONE_S / TPOT_S  # of a step
    assert lent_s(TPOT_S, settings=replace(SETTINGS, lent=0.05)) == pytest.approx(TPOT_S + 0.5 * gain**2)
    assert lent_s(TPOT_S, life_s=50.0) == pytest.approx(TPOT_S + 20 * 20e-3)  # at most so many prices
    assert lent_s(TPOT_S, longest_s=0.1) == 0.1  # a gap
    assert lent_s(TPOT_S, settings=replace(SETTINGS, longest=2.0)) == 2 * TPOT_S


def test_a_step_without_room_for_a_chunk_worth_the_price_has_none() -> None:
    assert lent_s(TPOT_S, life_s=math.inf) == ALONE_S  # nothing to lend: 6.8 ms for chunks are left
    assert lent_s(TPOT_S, work_s=5e-3, life_s=math.inf) == TPOT_S  # but that is all that waits
    behind_s = TPOT_S - SETTINGS.catch_up * 0.4  # a stream lags by 0.4 s, more than could be lent
    assert lent_s(behind_s, lead_s=-0.4) == min(behind_s, ALONE_S)


def test_a_lead_is_spent_on_a_chunk() -> None:
    ahead_s = TPOT_S + SETTINGS.bank_use * 0.08
    assert lent_s(ahead_s, life_s=math.inf, lead_s=0.08) == pytest.approx(TPOT_S + 0.08)


def test_a_gap_limit_has_a_margin_of_its_own() -> None:
    settings = replace(SETTINGS, safety=0.9, gap_safety=0.8)
    targets = Targets(2.0, 0.1, 0.11)
    assert aim_s(targets, settings) == pytest.approx(0.88 * 0.1)
    assert aim_s(Targets(2.0, 0.1), settings) == pytest.approx(0.09)
    assert step_budget_s(targets, 0.3, settings) == pytest.approx(0.088)  # the lead would allow for more
    assert step_budget_s(targets, 0.1, replace(settings, gap_safety=0.9)) == pytest.approx(0.09)
