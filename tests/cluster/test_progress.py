from __future__ import annotations

import io

from rich.console import Console

from cluster.progress import ConversionProgress


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


def test_a_terminal_gets_a_bar_in_bytes() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, force_interactive=True)
    with ConversionProgress(console) as display:
        display.report("converting", 1_000_000_000, 4_000_000_000)
    assert "converting" in output.getvalue()
    assert "1.0/4.0 GB" in output.getvalue()
