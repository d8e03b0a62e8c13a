"""What a person sees while they wait: phases with their seconds; for a model, gigabytes and seconds.

On a terminal one line that moves; elsewhere one line at the start and one at the end of each phase, so
that a log stays readable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.status import Status

from cluster.clock import Clock

GIGABYTE = 1e9


class ConversionProgress:
    """Use as a context manager; `report` is the callback that `prepare_model` wants."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._phase = ""
        self._task: TaskID | None = None
        self._started_s = 0.0

    def __enter__(self) -> ConversionProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def report(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """`total_bytes` 0: not known, only the phase is shown. Phase "": the one before has ended."""
        if not phase:
            self._end(0)
            return
        if phase != self._phase:
            self._begin(phase, total_bytes)
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes, total=total_bytes or None)
        if 0 < total_bytes <= done_bytes:
            self._end(total_bytes)

    def _begin(self, phase: str, total_bytes: int) -> None:
        self._phase, self._started_s = phase, time.monotonic()
        self._remove_bar()
        self._task = self._bars.add_task(phase, total=total_bytes or None)
        if not self._console.is_terminal:
            size = f" {total_bytes / GIGABYTE:.2f} GB" if total_bytes else ""
            self._console.print(f"{phase}{size} ...")

    def _end(self, total_bytes: int) -> None:
        seconds = time.monotonic() - self._started_s
        size = f"{total_bytes / GIGABYTE:.2f} GB in " if total_bytes else ""
        self._console.print(f"{self._phase}: {size}{seconds:.1f} s")
        self._remove_bar()
        self._phase = ""

    def _remove_bar(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = None


class TerminalReport:
    """How `baton serve` looks: a `cluster.launch_driver.Report` for people.

    `ready_text(seconds)` is printed when everything serves, `stopping_text()` when that ends. `progress` may
    come from another thread.
    """

    def __init__(
        self,
        console: Console,
        clock: Clock,
        ready_text: Callable[[float], str],
        stopping_text: Callable[[], str],
    ) -> None:
        self._console = console
        self._clock = clock
        self._ready_text = ready_text
        self._stopping_text = stopping_text
        self._is_ready = False
        self._started_at = clock.now()
        self._phase: tuple[str, float] | None = None
        self._status: Status | None = None  # on a terminal, while a phase lasts and no bar is shown
        self._conversion: ConversionProgress | None = None
        self._lock = threading.Lock()

    def phase(self, name: str) -> None:
        with self._lock:
            self._end_phase()
            self._phase = (name, self._clock.now())
            if not self._console.is_terminal:
                self._console.print(f"{name} ...")
            self._start_status()

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            if self._conversion is None:
                self._stop_status()
                self._conversion = ConversionProgress(self._console)
                self._conversion.__enter__()
            self._conversion.report(phase, done_bytes, total_bytes)
            if not phase or 0 < total_bytes <= done_bytes:
                self._end_conversion()
                self._start_status()

    def say(self, text: str) -> None:
        with self._lock:
            self._console.print(f"[yellow]![/] {escape(text)}")

    def ready(self) -> None:
        with self._lock:
            self._end_phase()
            self._is_ready = True
            self._console.print(self._ready_text(self._clock.now() - self._started_at))

    def stopping(self) -> None:
        text = self._stopping_text() if self._is_ready else "Stopping before it was ready."
        with self._lock:
            self._stop_status()
            self._console.print(escape(text))

    def close(self) -> None:
        with self._lock:
            self._end_conversion()
            self._stop_status()

    def _start_status(self) -> None:
        if self._console.is_terminal and self._phase is not None and self._conversion is None:
            self._status = self._console.status(self._phase[0])
            self._status.start()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
        self._status = None

    def _end_phase(self) -> None:
        self._stop_status()
        if self._phase is not None:
            name, started_at = self._phase
            self._console.print(f"[green]✓[/] {name} [dim]{self._clock.now() - started_at:.1f} s[/]")
        self._phase = None

    def _end_conversion(self) -> None:
        if self._conversion is not None:
            self._conversion.__exit__(None, None, None)
        self._conversion = None
