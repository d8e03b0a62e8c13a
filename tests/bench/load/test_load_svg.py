"""Scales, ticks and chart primitives: where a value lands, and that the markup is well-formed and safe."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.report.bars import Layer, histogram, make_bins, stacked_steps
from bench.load.report.frame import Axis, Mark, make_frame, shorten
from bench.load.report.gantt import Phase, Row, Segment, gantt
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
from bench.load.report.svg import Markup, escape, marker, path, px, tag
from bench.load.report.xy import Dot, Series, spread, xy_chart

finite = st.floats(-1e12, 1e12)
positive = st.floats(1e-9, 1e12)
HOSTILE = '<script>alert("1")</script>&\'"]]>\x00\ud800\u202e'


def parse(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


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


# Markup


def test_text_is_escaped_once_and_what_xml_forbids_is_replaced() -> None:
    made = tag("text", {"class": HOSTILE}, HOSTILE)
    root = parse(made)
    expected = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert root.text == expected
    assert root.get("class") == expected
    assert "<script" not in made
    made.encode()


def test_markup_is_not_escaped_again() -> None:
    assert tag("g", None, tag("text", None, "a & b")) == "<g><text>a &amp; b</text></g>"
    assert isinstance(escape("a"), Markup)


@given(st.text())
def test_any_text_survives_as_well_formed_xml(content: str) -> None:
    parse(tag("text", {"a": content}, content))


def test_coordinates_have_one_decimal_and_no_minus_zero() -> None:
    assert [px(v) for v in (1.0, 1.26, -0.01, 0.04, 1e3)] == ["1", "1.3", "0", "0", "1000"]


@pytest.mark.parametrize("shape", range(6))
def test_every_marker_is_centred(shape: int) -> None:
    node = parse(marker(shape, 50, 40, "dot"))
    if node.tag == "circle":
        assert (node.get("cx"), node.get("cy")) == ("50", "40")
        return
    if node.tag == "rect":
        x, y, width, height = (float(node.get(key, "")) for key in ("x", "y", "width", "height"))
        assert (x + width / 2, y + height / 2) == (50, 40)
        return
    corners = [tuple(map(float, pair.split(","))) for pair in node.get("points", "").split()]
    assert all(abs(x - 50) <= 6 and abs(y - 40) <= 6 for x, y in corners)
    assert (min(x for x, _ in corners) + max(x for x, _ in corners)) / 2 == pytest.approx(50, abs=0.1)


def test_an_empty_path_is_nothing() -> None:
    assert path([], "ln") == ""


@pytest.mark.parametrize("limit", [5, 8, 26])
def test_a_long_name_is_cut_in_its_middle_to_the_limit(limit: int) -> None:
    name = "organisation/some-very-long-model-name-instruct"
    cut = shorten(name, limit)
    assert len(cut) == limit
    assert (cut[0], cut[-1]) == (name[0], name[-1])
    assert shorten("short") == "short"


@given(st.lists(st.floats(0, 300), max_size=12).map(sorted))
def test_spread_labels_keep_their_order_and_distance(places: list[float]) -> None:
    moved = spread(places, 0, 300, 14)
    assert all(b - a >= 14 - 1e-6 for a, b in itertools.pairwise(moved))
    assert all(-1e-6 <= place <= 300 + 1e-6 for place in moved)


def test_spread_moves_two_close_labels_apart_evenly_and_leaves_the_rest() -> None:
    assert spread([50, 100, 104, 200], 0, 300, 14) == [50, 95, 109, 200]


# Charts


def polyline(root: ET.Element) -> list[tuple[float, float]]:
    (line,) = of_class(root, "ln")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) (\S+)", line.get("d", ""))]


def test_a_line_runs_through_the_pixels_of_its_values() -> None:
    series = Series("s", line=[(0, 0), (5, 50), (10, 100)], dots=[Dot(10, 100, "the end")])
    root = parse(xy_chart("chart", [series], Axis("x"), Axis("y", lo=0, hi=100)))
    frame = make_frame(Axis("x"), Axis("y", lo=0, hi=100), [0, 10], [0, 100])
    middle = ((frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2)
    assert polyline(root) == [(frame.left, frame.bottom), middle, (frame.right, frame.top)]
    (dot,) = of_class(root, "dot")
    assert (float(dot.get("cx", "")), float(dot.get("cy", ""))) == (frame.right, frame.top)


def test_a_log_axis_puts_the_geometric_mean_in_the_middle() -> None:
    series = Series("s", line=[(1, 1), (10, 10), (100, 100)])
    root = parse(xy_chart("chart", [series], Axis("x", is_log=True), Axis("y", is_log=True)))
    (x0, y0), (x1, y1), (x2, y2) = polyline(root)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.11)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.11)


def test_reference_lines_are_at_their_values_and_widen_the_axis() -> None:
    series = Series("s", line=[(0, 0), (10, 50)])
    root = parse(xy_chart("c", [series], Axis("x"), Axis("y"), across=[Mark(200, "SLO", css="slo")]))
    (slo,) = of_class(root, "slo")
    assert slo.get("y1") == slo.get("y2")
    assert float(slo.get("y1", "")) < min(y for _, y in polyline(root))
    assert "SLO" in [node.text for node in of_class(root, "ref-label")]


def test_points_that_are_not_finite_are_left_out() -> None:
    series = Series("s", line=[(0, 1), (1, math.nan), (math.inf, 2), (2, 3)], dots=[Dot(math.nan, 1, "no")])
    root = parse(xy_chart("c", [series], Axis("x"), Axis("y")))
    assert len(polyline(root)) == 2
    assert not of_class(root, "dot")


def test_a_legend_names_several_series_and_labels_at_the_ends_replace_it() -> None:
    two = [Series("first", line=[(0, 1), (1, 2)]), Series("second", line=[(0, 2), (1, 4)], colour=1, dash=1)]
    with_legend = parse(xy_chart("c", two, Axis("x"), Axis("y")))
    assert [node.text for node in of_class(with_legend, "key")] == ["first", "second"]
    labelled = parse(xy_chart("c", two, Axis("x"), Axis("y"), label_ends=True))
    assert not of_class(labelled, "key")
    assert {node.text for node in of_class(labelled, "end")} == {"first", "second"}


def test_no_two_of_six_series_share_colour_and_dash_and_marker() -> None:
    many = [Series(f"s{i}", line=[(0, i), (1, i)], colour=i, dash=i, shape=i) for i in range(6)]
    lines = of_class(parse(xy_chart("c", many, Axis("x"), Axis("y"))), "ln")
    assert len({line.get("class") for line in lines}) == 6


def test_every_point_tells_itself_and_can_be_focused() -> None:
    root = parse(xy_chart("c", [Series("s", dots=[Dot(1, 2, HOSTILE)])], Axis("x"), Axis("y")))
    (point,) = of_class(root, "pt")
    assert point.get("tabindex") == "0"
    title = point.find("title")
    assert title is not None
    assert title.text is not None
    assert title.text.startswith('<script>alert("1")')


def test_a_chart_without_any_value_is_still_a_chart() -> None:
    root = parse(xy_chart("c", [Series("s")], Axis("x"), Axis("y")))
    assert of_class(root, "axis")


def test_bins_hold_every_value_once_and_are_whole_for_whole_values() -> None:
    assert [(b.lo, b.hi, b.count) for b in make_bins([1.0, 2.0, 2.0, 3.0])] == [
        (1, 2, 1),
        (2, 3, 2),
        (3, 4, 1),
    ]
    assert make_bins([]) == []
    assert [(b.lo, b.count) for b in make_bins([7.0, 7.0])] == [(7, 2)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_bins_count_all_values(values: list[float]) -> None:
    bins = make_bins(values)
    assert sum(b.count for b in bins) == len(values)
    assert len(bins) <= 33


def test_bars_are_as_high_as_their_counts() -> None:
    bins = make_bins([1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0])
    root = parse(histogram("h", bins, Axis("x"), Axis("y", lo=0), [str(b.count) for b in bins]))
    heights = [float(bar.get("height", "")) for bar in of_class(root, "bar")]
    assert [h / heights[0] for h in heights] == pytest.approx([1, 4, 2], rel=1e-2)


def test_steps_are_stacked_in_order() -> None:
    layers = [Layer("a", [1, 2], 0), Layer("b", [3, 0], 1)]
    root = parse(
        stacked_steps("s", [0, 10, 20], layers, Axis("x", is_tight=True), Axis("y", lo=0), ["t1", "t2"])
    )
    lower, upper = of_class(root, "thin")
    heights = [[float(y) for _, y in re.findall(r"[ML](\S+) (\S+)", n.get("d", ""))] for n in (lower, upper)]
    zero = max(float(n.get("y1", "")) for n in of_class(root, "axis"))
    unit = zero - heights[0][0]
    assert [(zero - y) / unit for y in heights[0]] == pytest.approx([1, 1, 2, 2], abs=0.02)
    assert [(zero - y) / unit for y in heights[1]] == pytest.approx([4, 4, 2, 2], abs=0.02)
    assert [node[0].text for node in of_class(root, "pt")] == ["t1", "t2"]


def test_a_timeline_row_spans_its_time_and_rows_follow_one_another() -> None:
    rows = [
        Row("a", (Segment(0, 2, Phase.WAIT), Segment(2, 10, Phase.STREAM)), first_token=2),
        Row("b", (Segment(5, 10, Phase.WAIT),), failed_at=10),
    ]
    root = parse(gantt("t", rows, Axis("s", is_tight=True)))
    wait, other = (n for n in of_class(root, "p-wait") if float(n.get("width", "")) > 12)
    (stream,) = (n for n in of_class(root, "p-stream") if float(n.get("width", "")) > 12)
    x = {name: float(n.get("x", "")) for name, n in (("wait", wait), ("stream", stream), ("other", other))}
    total = float(wait.get("width", "")) + float(stream.get("width", ""))
    assert float(wait.get("width", "")) == pytest.approx(total * 0.2, abs=0.2)
    assert x["stream"] == pytest.approx(x["wait"] + total * 0.2, abs=0.2)
    assert x["other"] == pytest.approx(x["wait"] + total * 0.5, abs=0.2)
    assert float(other.get("y", "")) > float(wait.get("y", ""))
    assert {n.text for n in of_class(root, "key")} == {"no token yet", "streaming", "first token", "failed"}


def test_equal_input_gives_equal_bytes() -> None:
    series = [Series("s", line=[(0.1 + 0.2, 1 / 3), (1, 2)])]
    assert xy_chart("c", series, Axis("x"), Axis("y")) == xy_chart("c", series, Axis("x"), Axis("y"))
