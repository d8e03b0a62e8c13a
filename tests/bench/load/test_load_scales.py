"""Ticks, scales and numbers as text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.report.frame import Axis
from bench.load.report.scales import (
    LinearScale,
    LogScale,
    aligned,
    duration,
    log_ticks,
    nice_step,
    nice_ticks,
    quantity,
    tick_label,
)

finite = st.floats(-1e12, 1e12)
positive = st.floats(1e-9, 1e12)

# Ticks


@pytest.mark.parametrize(
    ("lo", "hi", "num", "ticks"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (3, 17, 4, [5, 10, 15]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
        (0, 0.0004, 4, [0, 0.0001, 0.0002, 0.0003, 0.0004]),
        (5, 5, 4, [5]),
        (1, 0, 2, [0, 0.5, 1]),
    ],
)
def test_nice_ticks(lo: float, hi: float, num: int, ticks: list[float]) -> None:
    assert nice_ticks(lo, hi, num) == ticks


@given(lo=finite, hi=finite, num=st.integers(1, 12))
def test_ticks_are_few_inside_ascending_and_evenly_spaced(lo: float, hi: float, num: int) -> None:
    lo, hi = min(lo, hi), max(lo, hi)
    ticks = nice_ticks(lo, hi, num)
    dust = 1e-8 * max(abs(lo), abs(hi), 1e-300)
    assert len(ticks) <= num + 1
    assert all(lo - dust <= tick <= hi + dust for tick in ticks)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(step > 0 for step in steps)
    assert all(step == pytest.approx(steps[0], abs=dust) for step in steps)


@given(span=st.floats(1e-12, 1e12), num=st.integers(1, 20))
def test_a_step_is_1_2_or_5_times_a_power_of_ten_and_the_smallest_that_fits(span: float, num: int) -> None:
    step = nice_step(span, num)
    mantissa = step / 10 ** math.floor(math.log10(step * (1 + 1e-9)))
    assert any(mantissa == pytest.approx(one) for one in (1, 2, 5))
    assert span / step <= num * (1 + 1e-6)
    assert span / (step / 2.6) > num * (1 - 1e-6) or num == 1


@pytest.mark.parametrize(
    ("lo", "hi", "num", "ticks"),
    [
        (1, 100, 8, [1, 2, 5, 10, 20, 50, 100]),
        (1, 1000, 8, [1, 3, 10, 30, 100, 300, 1000]),
        (1, 1e6, 8, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (0.02, 0.3, 8, [0.02, 0.05, 0.1, 0.2]),
        (0, 10, 8, []),
    ],
)
def test_log_ticks(lo: float, hi: float, num: int, ticks: list[float]) -> None:
    assert log_ticks(lo, hi, num) == pytest.approx(ticks)


@given(lo=positive, ratio=st.floats(1, 1e12), num=st.integers(2, 10))
def test_log_ticks_are_few_and_inside(lo: float, ratio: float, num: int) -> None:
    ticks = log_ticks(lo, lo * ratio, num)
    assert len(ticks) <= num
    assert ticks == sorted(ticks)
    assert all(lo * (1 - 1e-6) <= tick <= lo * ratio * (1 + 1e-6) for tick in ticks)


# Scales


def test_a_linear_scale_maps_ends_and_middle_and_holds_what_is_outside() -> None:
    scale = LinearScale(0, 10, 100, 300)
    assert [scale(v) for v in (0, 5, 10, -4, 99)] == [100, 200, 300, 100, 300]


def test_a_log_scale_gives_each_decade_the_same_room() -> None:
    scale = LogScale(1, 1000, 0, 300)
    assert [round(scale(v), 6) for v in (1, 10, 100, 1000, 0.0, 1e9)] == [0, 100, 200, 300, 0, 300]


@given(values=st.lists(finite, min_size=1, max_size=20))
def test_a_nice_scale_covers_its_data_and_ends_on_ticks(values: list[float]) -> None:
    scale = LinearScale.nice(min(values), max(values), 0, 100)
    dust = 1e-9 * max(abs(v) for v in values)
    assert scale.lo < scale.hi
    assert all(scale.lo - dust <= value <= scale.hi + dust for value in values)
    assert all(0 <= scale(value) <= 100 for value in values)


@given(values=st.lists(positive, min_size=1, max_size=20))
def test_a_nice_log_scale_covers_its_data(values: list[float]) -> None:
    scale = LogScale.nice(min(values), max(values), 0, 100)
    assert 0 < scale.lo <= min(values) * (1 + 1e-6)
    assert max(values) * (1 - 1e-6) <= scale.hi
    assert scale.lo < scale.hi


def test_an_axis_without_data_or_without_a_positive_value_is_linear_from_zero_to_one() -> None:
    for axis, values in ((Axis("x"), []), (Axis("x", is_log=True), [0.0]), (Axis("x"), [math.nan, math.inf])):
        assert axis.scale(values, 0, 100, 5) == LinearScale(0.0, 1.0, 0, 100)


def test_a_fixed_axis_keeps_its_ends_unless_data_lies_outside() -> None:
    axis = Axis("%", lo=0, hi=98)
    assert axis.scale([50], 0, 100, 5) == LinearScale(0, 98, 0, 100)
    assert axis.scale([104], 0, 100, 5).ticks(5)[-1] >= 104


# Numbers as text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (1.5, "1.5"), (200, "200"), (20_000, "20,000"), (3e6, "3M"), (2.5e9, "2.5G")],
)
def test_tick_label(value: float, text: str) -> None:
    assert tick_label(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05123, "0.0512"),
        (0.5, "0.5"),
        (4.2149, "4.21"),
        (42.15, "42.1"),
        (1234.5, "1,234"),
        (3, "3"),
    ],
)
def test_quantity(value: float, text: str) -> None:
    assert quantity(value) == text


def test_quantity_with_unit_and_of_nothing() -> None:
    assert quantity(12.5, "%") == "12.5 %"
    assert quantity(math.nan, "ms") == "–"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.00085, "850 µs"), (0.0125, "12.5 ms"), (1.2449, "1.24 s"), (725, "12 min 5 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_column_has_the_same_decimals_throughout() -> None:
    assert aligned([94.0, 84.5, None, 100.0]) == ["94.0", "84.5", "–", "100.0"]
    assert aligned([3.0, 0.0]) == ["3", "0"]
    assert aligned([64.5, 3838.2]) == ["64", "3,838"]
