from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.clock import MonotonicClock
from cluster.progress import ConversionProgress, TerminalReport


def test_a_log_gets_one_line_per_start_and_end_of_a_phase() -> None:
    output = io.StringIO()
    with ConversionProgress(Console(file=output, width=100)) as display:
        display.report("reading", 0, 0)
        for done in range(0, 2_500_000_001, 250_000_000):
            display.report("converting", done, 2_500_000_000)
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["reading ...", "converting 2.50 GB ..."]
    assert lines[2].startswith("converting: 2.50 GB in 0.")
    assert len(lines) == 3


def test_a_terminal_shows_the_phase_the_bar_and_the_phase_again() -> None:
    output = io.StringIO()
    console = Console(
        file=output,
        width=100,
        force_terminal=True,
        force_interactive=True,
        highlight=False,
        color_system=None,
    )
    report = TerminalReport(console, MonotonicClock(), lambda seconds: "ready", lambda: "never")
    report.phase("first")
    report.progress("compiling", 0, 0)
    report.phase("second")  # while a bar is shown
    report.progress("", 0, 0)
    report.progress("converting", 0, 1_000_000_000)
    report.progress("converting", 1_000_000_000, 1_000_000_000)
    report.phase("third")
    report.ready()
    report.close()
    text = output.getvalue()
    for part in ("first", "second", "compiling: 0.", "converting: 1.00 GB in 0.", "third", "ready"):
        assert part in text


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_end_is_told_in_one_line(is_ready: bool) -> None:
    output = io.StringIO()
    report = TerminalReport(
        Console(file=output, width=100), MonotonicClock(), lambda seconds: "ready", lambda: "Stopping: [3]"
    )
    report.phase("workers")
    if is_ready:
        report.ready()
    before = len(output.getvalue().splitlines())
    report.stopping()
    report.close()
    told = "Stopping: [3]" if is_ready else "Stopping before it was ready."
    assert output.getvalue().splitlines()[before:] == [told]


def test_a_terminal_gets_a_bar_in_bytes() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, force_interactive=True)
    with ConversionProgress(console) as display:
        display.report("converting", 1_000_000_000, 4_000_000_000)
    assert "converting" in output.getvalue()
    assert "1.0/4.0 GB" in output.getvalue()
