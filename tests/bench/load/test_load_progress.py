"""The live display: a panel on a terminal, else plain lines; always a last line; never the run's end."""

from __future__ import annotations

import io
import re

import msgspec
import pytest

from bench.load.client.gather import Progress
from bench.load.progress import (
    LINE_EVERY_S,
    PREPARING,
    LiveProgress,
    clock,
    failures,
    milliseconds,
    progress_line,
    totals_line,
)
from bench.load.records import Status
from cluster.errors import BatonError

AT = Progress(
    elapsed_s=12.3,
    num_planned=2000,
    num_offered=148,
    num_in_flight=6,
    num_ended={Status.OK: 139, Status.TIMEOUT: 2, Status.REFUSED: 1},
    num_output_tokens=5000,
    recent_ttft_s=0.2104,
    recent_itl_s=0.0321,
    recent_tokens_per_s=118.4,
)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests are run on: a dumb one gets lines."""
    monkeypatch.setenv("TERM", "xterm")


def at(elapsed_s: float) -> Progress:
    return msgspec.structs.replace(AT, elapsed_s=elapsed_s)


def test_a_line_tells_load_answers_failures_and_speed() -> None:
    assert progress_line(AT) == (
        "12 s, offered 148 of 2,000, in flight 6, ok 139, failed 3 (timeout 2, refused 1), 118 tok/s, "
        "TTFT 210 ms, ITL 32.1 ms"
    )


def test_a_line_leaves_out_what_there_is_none_of() -> None:
    start = Progress(
        elapsed_s=0.0, num_planned=5, num_offered=0, num_in_flight=0, num_ended={}, num_output_tokens=0
    )
    assert progress_line(start) == "0 s, offered 0 of 5, ok 0, 0 tok/s"
    assert totals_line(start) == "0 s, offered 0 of 5, ok 0, 0 output tokens"
    assert failures(start) == "0"


def test_the_last_line_tells_totals_and_nothing_recent() -> None:
    end = msgspec.structs.replace(AT, elapsed_s=100.0, num_in_flight=0, recent_tokens_per_s=3.0)
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=False) as live:
        live.update(end)
    assert stream.getvalue().splitlines()[-1] == (
        "demo: ended: 1:40, offered 148 of 2,000, ok 139, failed 3 (timeout 2, refused 1), "
        "5,000 output tokens, 50 tok/s"
    )


def test_what_was_never_sent_is_no_failure() -> None:
    cut = msgspec.structs.replace(AT, num_ended={Status.OK: 5, Status.SKIPPED: 7})
    assert failures(cut) == "0"
    assert "ok 5, never sent 7, " in progress_line(cut)
    assert "failed" not in totals_line(cut)


def test_the_slow_end_is_told() -> None:
    tail = msgspec.structs.replace(AT, recent_ttft_p99_s=0.9)
    assert "TTFT 210 ms, TTFT p99 900 ms, ITL 32.1 ms" in progress_line(tail)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (185, "3:05"), (3729, "1:02:09")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_milliseconds() -> None:
    assert [milliseconds(v) for v in (None, 0.0321, 1.25)] == ["–", "32.1 ms", "1,250 ms"]


def test_a_terminal_says_what_goes_on_before_the_first_request() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=True):
        assert f"demo: {PREPARING}" in stream.getvalue()
    assert stream.getvalue().endswith("demo: ended: no request was sent\n")
    with LiveProgress("demo", plain := io.StringIO(), is_terminal=False):
        assert plain.getvalue() == ""


def test_elsewhere_than_on_a_terminal_there_is_a_line_every_few_seconds_and_a_last_one() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=False) as live:
        for quarter in range(round(4 * (2 * LINE_EVERY_S + 1))):
            live.update(at(quarter / 4))
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["demo: 5 s", "demo: 10 s", "demo: ended: 10 s"]
    assert "\x1b" not in stream.getvalue()


def test_a_gap_between_updates_makes_one_line_and_not_several() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=False) as live:
        for elapsed_s in (1.0, 33.0, 33.25, 35.0):
            live.update(at(elapsed_s))
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["demo: 33 s", "demo: 35 s", "demo: ended: 35 s"]


def test_a_long_line_is_not_broken() -> None:
    stream = io.StringIO()
    with LiveProgress("a title " * 30, stream, is_terminal=False) as live:
        live.update(at(5.0))
    assert len(stream.getvalue().splitlines()) == 2


def test_on_a_terminal_the_panel_shows_all_figures_and_goes_away_for_the_last_line() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=True) as live:
        live.update(AT)
        shown = stream.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    for part in (
        "142 of 2,000 ended",
        "offered 148",
        "3 (timeout 2, refused 1)",
        "118 tok/s",
        "210 ms",
        "32.1 ms",
    ):
        assert part in plain
    last = stream.getvalue()[len(shown) :]
    assert "ended: 12 s, offered 148 of 2,000" in last


def test_markup_in_a_title_is_text() -> None:
    for is_terminal in (True, False):
        stream = io.StringIO()
        with LiveProgress("[bold]m[/x]", stream, is_terminal=is_terminal) as live:
            live.update(at(6.0))
        assert "[bold]m[/x]" in stream.getvalue()


def test_a_run_without_an_update_says_that_nothing_was_sent() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=False):
        pass
    assert stream.getvalue() == "demo: ended: no request was sent\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_error_before_the_first_request_is_told_by_itself(is_terminal: bool) -> None:
    """The command prints the error; a second line about it would say nothing."""
    stream = io.StringIO()
    with (
        pytest.raises(BatonError),
        LiveProgress("demo", stream, is_terminal=is_terminal),
    ):
        raise BatonError("the plan cannot be built")
    assert "no request" not in stream.getvalue()


def test_a_run_that_breaks_off_later_tells_how_far_it_came() -> None:
    stream = io.StringIO()

    def break_off() -> None:
        with LiveProgress("demo", stream, is_terminal=False) as live:
            live.update(at(1.0))
            raise BatonError("later")

    with pytest.raises(BatonError):
        break_off()
    assert "demo: broken off: " in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_error_passes_through_and_the_last_line_says_broken_off(is_terminal: bool) -> None:
    stream = io.StringIO()

    def run() -> None:
        with LiveProgress("demo", stream, is_terminal=is_terminal) as live:
            live.update(AT)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        run()
    assert "broken off: 12 s" in stream.getvalue()


class ClosedPipe(io.StringIO):
    """Takes so many writes, then fails as a pipe does whose reader is gone."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self.num_writes = num_writes

    def write(self, text: str) -> int:
        if self.num_writes == 0:
            raise BrokenPipeError("the reader is gone")
        self.num_writes -= 1
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("num_writes", [0, 1, 2])
def test_a_closed_pipe_ends_the_display_and_not_the_run(is_terminal: bool, num_writes: int) -> None:
    num_updates = 0
    with LiveProgress("demo", ClosedPipe(num_writes), is_terminal=is_terminal) as live:
        for elapsed_s in (5.0, 10.0, 15.0):
            live.update(at(elapsed_s))
            num_updates += 1
    assert num_updates == 3


def test_a_closed_stream_ends_the_display_and_not_the_run() -> None:
    stream = io.StringIO()
    with LiveProgress("demo", stream, is_terminal=False) as live:
        stream.close()
        live.update(at(5.0))
