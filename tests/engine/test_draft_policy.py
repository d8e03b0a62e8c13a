"""How many drafts a step brings: what is right is drafted more, what does not pay is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.draft_policy import MOST_ROWS, Acceptance, DraftCosts, choose

FALLING = [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]
BASE_S, EACH_S = 7e-3, 0.5e-3  # one row of the demo model


def test_drafts_are_taken_while_they_pay_and_no_step_gets_longer_than_it_may() -> None:
    assert choose([FALLING], 1, BASE_S, EACH_S, 1.0) == [7]
    assert choose([FALLING], 1, BASE_S, EACH_S, BASE_S + 3.5 * EACH_S) == [3]
    assert choose([FALLING], 1, BASE_S, EACH_S, BASE_S / 2) == [0]
    assert choose([[0.05]], 1, BASE_S, EACH_S, 1.0) == [0]
    assert choose([], 1, BASE_S, EACH_S, 1.0) == []


def test_the_more_rows_there_are_the_likelier_a_draft_has_to_be() -> None:
    """A second that 32 rows share is worth more than one that a single row has."""
    counts = [
        sum(choose([FALLING] * rows, rows, 6e-3 + 1e-3 * rows, 0.7e-3, 1.0)) / rows for rows in (1, 4, 16)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 5
    assert choose([FALLING] * 32, 32, 30e-3, 1e-3, 1.0) == [0] * 32


@given(
    chances=st.lists(
        st.lists(st.floats(0, 1), max_size=5).map(lambda x: sorted(x, reverse=True)), max_size=4
    ),
    more=st.integers(0, 4),
    each_s=st.floats(1e-5, 1e-2),
)
def test_what_is_chosen_is_the_best_of_its_size_and_yields_more_than_nothing(
    chances: list[list[float]], more: int, each_s: float
) -> None:
    rows = len(chances) + more or 1
    counts = choose(chances, rows, BASE_S, each_s, 1.0)
    taken = [chance for of_one, count in zip(chances, counts, strict=True) for chance in of_one[:count]]
    best = sorted((chance for of_one in chances for chance in of_one), reverse=True)
    assert sum(taken) == pytest.approx(sum(best[: len(taken)]))
    assert (rows + sum(taken)) / (BASE_S + each_s * len(taken)) >= rows / BASE_S


def test_a_record_follows_what_was_right_and_fades() -> None:
    common = Acceptance()
    good, bad = Acceptance(common), Acceptance(common)
    at_first = good.chances(3, 4)
    assert at_first == sorted(at_first, reverse=True)
    for _ in range(12):
        good.record(3, 4, 4)
        bad.record(3, 4, 0)
    assert good.chances(3, 1)[0] > 0.85
    assert bad.chances(3, 1)[0] < 0.2
    for _ in range(400):
        bad.passed_over()
    assert bad.chances(3, 1)[0] == pytest.approx(common.chances(3, 1)[0], abs=0.05)  # and is tried again


def test_a_longer_match_is_trusted_more() -> None:
    chances = [Acceptance(Acceptance()).chances(length, 1)[0] for length in range(2, 9)]
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_costs_are_learned_by_number_of_rows_and_a_disturbed_step_counts_little() -> None:
    costs = DraftCosts()
    assert costs.of(1) is None
    costs.observe(1, 0, BASE_S)
    base_s, each_s = costs.of(1) or (0.0, 0.0)
    assert base_s == pytest.approx(BASE_S)
    assert each_s == pytest.approx(0.07 * BASE_S)  # assumed
    for index in range(60):
        num_drafts = index % 8
        disturbance_s = 0.1 if index == 30 else 0.0
        costs.observe(1, num_drafts, BASE_S + 1e-3 * num_drafts + disturbance_s)
        costs.observe(4, num_drafts, 2 * BASE_S + 0.1e-3 * num_drafts)
    assert costs.of(1) == pytest.approx((BASE_S, 1e-3), rel=0.15)
    base_s, each_s = costs.of(4) or (0.0, 0.0)
    assert base_s == pytest.approx(2 * BASE_S, rel=0.05)
    assert each_s < 0.3e-3
    assert costs.of(2) is None


@pytest.mark.parametrize("num_rows", [1, 4, MOST_ROWS])
def test_after_a_time_of_wrong_drafts_they_are_tried_again(num_rows: int) -> None:
    """By requests that come new, too: what everybody had is not believed for ever."""
    common, costs = Acceptance(), DraftCosts()
    costs.observe(num_rows, 0, BASE_S)
    for _ in range(300):
        common.record(8, 3, 0)

    def tried(steps: int) -> int:
        found = 0
        for _ in range(steps):
            own = [Acceptance(common) for _ in range(num_rows)]
            counts = choose([one.chances(8, 3) for one in own], num_rows, *(costs.of(num_rows) or ()), 1.0)
            for one, count in zip(own, counts, strict=True):
                found += count
                if count:
                    one.record(8, count, count)
                else:
                    one.passed_over()
        return found

    assert tried(1) == 0
    assert tried(3_000) > 100
