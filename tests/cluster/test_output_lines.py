"""Lines are the same however the pipe cut them, and none grows without bound."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.output_lines import MAX_LINE_BYTES, OutputLines

TEXTS = st.lists(
    st.one_of(
        st.text("ab é\r", max_size=6),
        st.integers(MAX_LINE_BYTES - 2, 2 * MAX_LINE_BYTES + 2).map("x".__mul__),
    ),
    max_size=6,
)


def read(data: bytes, cuts: list[int]) -> tuple[list[str], str]:
    lines = OutputLines()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in pairwise(places)]
    return [line for piece in [*pieces, b""] for line in lines.feed(piece)], lines.last


@given(texts=TEXTS, has_end=st.booleans(), cuts=st.lists(st.integers(0, 40_000), max_size=8))
def test_any_cut_gives_the_same_lines(texts: list[str], has_end: bool, cuts: list[int]) -> None:
    data = "\n".join(texts).encode() + (b"\n" if has_end else b"")
    lines, last = read(data, cuts)
    assert (lines, last) == read(data, [])
    assert all(line and len(line.encode()) <= MAX_LINE_BYTES for line in lines)
    assert [line for line in lines if "x" not in line] == [
        text.rstrip() for text in texts if "x" not in text and text.rstrip()
    ]
    assert sum(line.count("x") for line in lines) == sum(text.count("x") for text in texts)
    assert last == (lines[-1] if lines else "")


def test_lines_and_what_is_left_at_the_end() -> None:
    lines = OutputLines()
    assert lines.feed(b"one\n\n two") == ["one"]
    assert lines.feed(b"\nthr\xff") == [" two"]
    assert lines.feed(b"") == ["thr\N{REPLACEMENT CHARACTER}"]
    assert lines.feed(b"") == []
