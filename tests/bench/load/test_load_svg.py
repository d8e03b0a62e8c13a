"""Chart primitives: where a value lands, and that the markup is well-formed and safe."""

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
from bench.load.report.svg import Markup, escape, marker, path, px, tag
from bench.load.report.xy import Dot, Series, spread, xy_chart

HOSTILE = '<script>alert("1")</script>&\'"]]>\x00\ud800\u202e'


def parse(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


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
