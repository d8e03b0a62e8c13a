"""How far below their targets steps aim, by how far they are from their predictions."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from cluster.slo_budget import SloSettings, step_budget_s
from cluster.slo_classes import Targets
from cluster.step_margin import with_margins

SETTINGS = SloSettings()
TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)


@pytest.mark.parametrize(
    ("bias", "spread"), [(0.0, 0.0), (0.0, 0.03), (-0.3, 0.2), (-0.1, 0.2), (1e-9, 1e-9)]
)
def test_steps_that_take_what_is_predicted_or_less_aim_as_before(bias: float, spread: float) -> None:
    assert with_margins(SETTINGS, bias, spread).safety == SETTINGS.safety


def test_a_bias_counts_in_full_and_a_spread_in_part() -> None:
    assert with_margins(SETTINGS, 0.1, 0.0).safety == pytest.approx(1 / 1.1)
    assert with_margins(SETTINGS, 0.0, 0.2).safety == pytest.approx(1 - 0.2 * math.sqrt(0.25 / 1.75))
    both = with_margins(SETTINGS, 0.05, 0.2).safety
    assert both == pytest.approx(1 / 1.05 - 0.2 * math.sqrt(0.25 / 1.75))
    assert with_margins(SETTINGS, 0.5, 3.0).safety == 0.8  # whatever the machine does


def test_a_gap_limit_holds_for_single_steps() -> None:
    found = with_margins(SETTINGS, 0.02, 0.06)
    assert found.gap_safety == pytest.approx(1 / (1.02 + 1.815 * 0.06), rel=1e-3)
    assert found.gap_safety < found.safety
    assert with_margins(SETTINGS, 0.0, 0.0).gap_safety == SETTINGS.gap_safety


def test_a_price_of_mixed_steps_within_the_spread_is_none() -> None:
    assert with_margins(SETTINGS, 0.0, 0.02).price_from == SETTINGS.price_from
    assert with_margins(SETTINGS, 0.05, 0.2).price_from == pytest.approx(0.2)


def lags(settings: SloSettings, bias: float, sigma: float) -> tuple[float, float]:
    """Of streams of 60 tokens on a full worker: (how many of them end with a lag, the mean step)."""
    rng, late, steps = random.Random(1), [], []
    for _ in range(500):
        slack_s = TARGETS.tpot_s
        for _ in range(60):
            step_s = step_budget_s(TARGETS, slack_s, settings) * (1 + bias + rng.gauss(0, sigma))
            slack_s += TARGETS.tpot_s - step_s
            steps.append(step_s)
        late.append(slack_s < TARGETS.tpot_s)
    return mean(late), mean(steps)


@pytest.mark.parametrize(("bias", "spread"), [(0.0, 0.1), (0.0, 0.25), (0.08, 0.12)])
def test_one_stream_in_ten_ends_with_a_lag_and_steps_are_as_long_as_before(
    bias: float, spread: float
) -> None:
    sigma = spread / 1.2816
    settings = with_margins(SETTINGS, bias, spread)
    share, step_s = lags(settings, bias, sigma)
    before, before_s = lags(SETTINGS, bias, sigma)
    assert share < 0.15 < before / 2
    assert step_s > 0.99 * min(before_s, TARGETS.tpot_s)  # the lead is built up once in 60 tokens
    lower, _ = lags(replace(settings, safety=settings.safety - 0.1), bias, sigma)
    assert lower < share
