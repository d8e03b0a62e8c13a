"""How far a stream is ahead of what it was promised, and what that leaves for a step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.pace import Pace, pace_of
from cluster.slo_classes import Targets
from cluster.slo_schedule import SloSettings
from cluster.wire.messages import PriorityClass, SloTargets

DEFAULTS = Targets(ttft_s=2.0, tpot_s=0.1)
SETTINGS = SloSettings()


def begun(tpot_s: float = 0.1, gap_s: float = math.inf, *, at_s: float = 10.0) -> Pace:
    pace = Pace(Targets(2.0, tpot_s, gap_s), due_s=12.0)
    pace.first_token(at_s)
    return pace


def test_without_a_word_the_workers_own_targets_hold_from_now() -> None:
    pace = pace_of(None, DEFAULTS, 5.0)
    assert (pace.due_s, pace.targets, pace.is_batch) == (7.0, DEFAULTS, False)


def test_what_the_router_says_is_relative_to_now() -> None:
    slo = SloTargets(ttft_deadline_in_s=-0.5, tpot_s=0.02, gap_s=0.3, priority_class=PriorityClass.BATCH)
    pace = pace_of(slo, DEFAULTS, 5.0)
    assert (pace.due_s, pace.targets.tpot_s, pace.targets.gap_s) == (4.5, 0.02, 0.3)
    assert pace.is_batch
    assert pace.yields


@pytest.mark.parametrize(
    ("num_generated", "now", "expected_s"),
    [
        (1, 10.0, 0.0985),  # token 1 is due one TPOT after token 0
        (3, 10.1, 0.0985 + 0.25 * 0.1),  # two tokens after one TPOT: one in hand
        (2, 10.15, 0.0985 - 0.1 * 0.05),  # half a TPOT behind
        (2, 13.0, 0.0985 / 2),  # far behind: never below half a TPOT
    ],
)
def test_the_budget_follows_the_mean_since_token_0(num_generated: int, now: float, expected_s: float) -> None:
    assert begun().budget_s(num_generated, 1000, now, SETTINGS) == pytest.approx(expected_s)


def test_a_lag_is_gone_before_the_answer_is() -> None:
    """It has a sixteenth of the tokens that are expected and may follow."""
    settings, lag_s = replace(SETTINGS, lag_share=1 / 16), 0.03
    for most, expected, share in (
        (1000, 400, 0.1),
        (1000, 100, 0.16),
        (40, 400, 0.4),
        (3, 400, 1),
        (40, 5, 1),
    ):
        found_s = begun().budget_s(2, most, 10.1 + lag_s, settings, expected)
        assert found_s == pytest.approx(0.0985 - share * lag_s)


def test_a_late_first_token_yields_and_a_later_attempt_does_not() -> None:
    assert not begun(at_s=11.9).yields
    assert begun(at_s=12.1).yields
    resumed = Pace(DEFAULTS, due_s=12.0, is_resumed=True)
    resumed.first_token(13.0)
    assert not resumed.yields
    # the client's clock ran while the attempt began: it lags by a second
    assert resumed.budget_s(1, 1000, 13.0, SETTINGS) < begun(at_s=12.0).budget_s(1, 1000, 12.0, SETTINGS)


def test_a_stream_that_cannot_catch_up_asks_for_nothing() -> None:
    pace = begun()
    assert pace.budget_s(2, 100, 14.0, SETTINGS) == pytest.approx(0.0985 / 2)
    assert pace.budget_s(2, 20, 14.0, SETTINGS) == math.inf


def test_the_gap_counts_from_the_last_token() -> None:
    pace = begun(gap_s=0.08)
    assert pace.budget_s(1, 1000, 10.0, SETTINGS) == pytest.approx(0.08 * 0.985)
    assert pace.budget_s(1, 1000, 10.05, SETTINGS) == pytest.approx(0.08 * 0.985 - 0.05)
    pace.token(10.06)
    assert pace.budget_s(2, 1000, 10.06, SETTINGS) == pytest.approx(0.08 * 0.985)
    assert pace.budget_s(2, 1000, 11.0, SETTINGS) == 0.0


@given(st.floats(0.005, 0.5), st.lists(st.floats(0.2, 1.0), min_size=1, max_size=60))
def test_a_stream_whose_steps_keep_their_budgets_keeps_its_mean(tpot_s: float, shares: list[float]) -> None:
    """Whatever part of its budget each step takes, token k comes at most k TPOTs after token 0."""
    pace, now = begun(tpot_s), 10.0
    for index, share in enumerate(shares, 1):
        now += share * pace.budget_s(index, 1000, now, SETTINGS)
        pace.token(now)
        assert now - 10.0 <= index * tpot_s + 1e-9
