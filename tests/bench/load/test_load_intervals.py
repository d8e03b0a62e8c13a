import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.intervals import STUDENT_95, mean_half_width, wilson


def test_student_by_hand() -> None:
    assert mean_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5)  # s = 1
    assert mean_half_width([5.0]) is None
    assert mean_half_width([]) is None
    assert mean_half_width([2.0, 2.0]) == 0.0


def test_student_table_has_thirty_falling_quantiles() -> None:
    assert len(STUDENT_95) == 30
    assert list(STUDENT_95) == sorted(STUDENT_95, reverse=True)
    assert mean_half_width(list(range(200))) == pytest.approx(2.0423 * 57.879 / 200**0.5, rel=1e-4)


def test_wilson_by_hand() -> None:
    # 8 of 10: centre (0.8 + 0.19207) / 1.38415, half 0.22656, by the formula
    low, high = wilson(8, 10) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 0) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_holds_the_share_within_zero_and_one(num: int, share: float) -> None:
    interval = wilson(share * num, num)
    assert interval is not None
    assert 0 <= interval[0] <= share + 1e-9
    assert share - 1e-9 <= interval[1] <= 1
