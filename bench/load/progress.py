"""What a person sees while a run goes on: a live panel on a terminal, else a plain line every few seconds.

1. `run_plan` calls `LiveProgress.update` a few times a second with how the run stands.
2. On a terminal the panel is drawn anew in place; elsewhere (a log, CI) there is a line every `LINE_EVERY_S`.
3. Leaving the context takes the panel away and writes one last line: the run's totals, whatever ended it. An
   error before the first request is told by itself.

All of it goes to standard error: standard output is for results. A run is worth more than its display, so an
output that cannot be written to any more (a closed pipe) ends the display and not the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.load.records import Status

LINE_EVERY_S = 5.0
PREPARING = "writing the prompts"  # of a long trace, or of texts that the server counts, it takes a while
_FAILED = frozenset(Status) - {Status.OK, Status.SKIPPED}


class Progress(Protocol):
    """How the run stands; `recent_*` are over the last few seconds, None where nothing ended in them."""

    @property
    def elapsed_s(self) -> float: ...
    @property
    def num_planned(self) -> int: ...
    @property
    def num_offered(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def num_ended(self) -> Mapping[Status, int]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def recent_ttft_s(self) -> float | None: ...
    @property
    def recent_ttft_p99_s(self) -> float | None: ...
    @property
    def recent_itl_s(self) -> float | None: ...
    @property
    def recent_tokens_per_s(self) -> float: ...


class _Display(Console):
    def on_broken_pipe(self) -> None:
        """Called where a BrokenPipeError was caught; rich would end the program here."""
        raise


class LiveProgress:
    """A context manager; `update` is to be called from one thread."""

    def __init__(self, title: str, stream: TextIO | None = None, is_terminal: bool | None = None) -> None:
        """`is_terminal` None asks the stream (default: standard error)."""
        self._title = title
        self._console = _Display(
            file=sys.stderr if stream is None else stream, force_terminal=is_terminal, highlight=False
        )
        self._live: Live | None = None
        self._latest: Progress | None = None
        self._next_line_s = LINE_EVERY_S
        self._is_writable = True

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            live = self._live
            self._write(live.start)
            self._write(lambda: live.update(Text(f"{self._title}: {PREPARING}"), refresh=True))
        return self

    def update(self, progress: Progress) -> None:
        self._latest = progress
        if self._live is not None:
            live = self._live
            self._write(lambda: live.update(panel(self._title, progress), refresh=True))
        elif progress.elapsed_s >= self._next_line_s:
            self._next_line_s = (progress.elapsed_s // LINE_EVERY_S + 1) * LINE_EVERY_S
            self._write_line(progress_line(progress))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._write(self._live.stop)
        if self._latest is None and error is not None:
            return  # nothing was offered: the error says all there is to say
        last = "no request was sent" if self._latest is None else totals_line(self._latest)
        self._write_line(f"{'ended' if error is None else 'broken off'}: {last}")

    def _write_line(self, line: str) -> None:
        self._write(lambda: self._console.print(Text(f"{self._title}: {line}"), soft_wrap=True))

    def _write(self, action: Action) -> None:
        if not self._is_writable:
            return
        try:
            action()
        except (OSError, ValueError):  # a closed pipe; a closed file object
            self._is_writable = False


class Action(Protocol):
    def __call__(self) -> object: ...


def progress_line(progress: Progress) -> str:
    """One line without markup: `12 s, offered 48 of 200, in flight 6, ok 41, failed 1 (timeout 1), …`."""
    parts = [*_counts(progress), f"{progress.recent_tokens_per_s:,.0f} tok/s"]
    recent = (
        ("TTFT", progress.recent_ttft_s),
        ("TTFT p99", progress.recent_ttft_p99_s),
        ("ITL", progress.recent_itl_s),
    )
    parts += [f"{name} {milliseconds(value)}" for name, value in recent if value is not None]
    return ", ".join(parts)


def totals_line(progress: Progress) -> str:
    """The whole run on one line: `42 s, offered 200 of 200, ok 199, failed 1 (timeout 1), 5,000 output
    tokens, 119 tok/s`; nothing in it is of the last few seconds."""
    parts = [*_counts(progress), f"{progress.num_output_tokens:,} output tokens"]
    if progress.elapsed_s > 0:
        parts.append(f"{progress.num_output_tokens / progress.elapsed_s:,.0f} tok/s")
    return ", ".join(parts)


def _counts(progress: Progress) -> list[str]:
    parts = [clock(progress.elapsed_s), f"offered {progress.num_offered:,} of {progress.num_planned:,}"]
    parts += [f"in flight {progress.num_in_flight:,}"] if progress.num_in_flight else []
    parts.append(f"ok {progress.num_ended.get(Status.OK, 0):,}")
    parts += [f"failed {failures(progress)}"] if num_failed(progress) else []
    parts += [f"never sent {num_unsent(progress):,}"] if num_unsent(progress) else []
    return parts


def panel(title: str, progress: Progress) -> RenderableType:
    """The bar shows what has ended; below it the load, the answers and how fast they come."""
    num_ended = sum(progress.num_ended.values())
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    total = max(progress.num_planned, 1)
    share = Text(f"{num_ended:,} of {progress.num_planned:,} ended, {clock(progress.elapsed_s)}")
    bar.add_row(
        ProgressBar(
            total=total,
            completed=min(num_ended, total),
            complete_style="cyan",
            finished_style="green",
        ),
        share,
    )
    failed_style = "bold red" if num_failed(progress) else ""
    load = _pairs(
        ("offered", f"{progress.num_offered:,}", ""),
        ("in flight", f"{progress.num_in_flight:,}", ""),
        ("ok", f"{progress.num_ended.get(Status.OK, 0):,}", "green"),
        ("failed", failures(progress), failed_style),
        *([("never sent", f"{num_unsent(progress):,}", "")] if num_unsent(progress) else []),
    )
    speed = _pairs(
        ("output", f"{progress.recent_tokens_per_s:,.0f} tok/s", ""),
        ("TTFT", milliseconds(progress.recent_ttft_s), ""),
        ("TTFT p99", milliseconds(progress.recent_ttft_p99_s), ""),
        ("ITL", milliseconds(progress.recent_itl_s), ""),
        ("tokens so far", f"{progress.num_output_tokens:,}", ""),
    )
    return Panel(Group(bar, load, speed), title=Text(title), title_align="left", border_style="dim")


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    """Name, value, style of the value; three blanks between pairs."""
    parts: list[tuple[str, str]] = []
    for name, value, style in pairs:
        parts += [("   " if parts else "", ""), (f"{name} ", "dim"), (value, style)]
    return Text.assemble(*parts)


def num_failed(progress: Progress) -> int:
    """Of those that were sent."""
    return sum(count for status, count in progress.num_ended.items() if status in _FAILED)


def num_unsent(progress: Progress) -> int:
    return progress.num_ended.get(Status.SKIPPED, 0)


def failures(progress: Progress) -> str:
    """`3 (timeout 2, refused 1)`, most frequent first; `0` without any."""
    kinds = [
        (count, status.value) for status, count in progress.num_ended.items() if status in _FAILED and count
    ]
    if not kinds:
        return "0"
    told = ", ".join(
        f"{name} {count:,}" for count, name in sorted(kinds, key=lambda kind: (-kind[0], kind[1]))
    )
    return f"{sum(count for count, _ in kinds):,} ({told})"


def milliseconds(value_s: float | None) -> str:
    if value_s is None:
        return "–"
    return f"{value_s * 1e3:,.0f} ms" if value_s >= 0.1 else f"{value_s * 1e3:.1f} ms"


def clock(seconds: float) -> str:
    """`42 s`, `3:05`, `1:02:09`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
