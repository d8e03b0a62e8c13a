"""What a person sees while a model is converted: gigabytes and seconds.

On a terminal one line that moves; elsewhere one line at the start and one at the end of each phase, so
that a log stays readable.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

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
        """`total_bytes` 0: not known, only the phase is shown."""
        if phase != self._phase:
            self._begin(phase, total_bytes)
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes, total=total_bytes or None)
        if 0 < total_bytes <= done_bytes:
            self._end(total_bytes)

    def _begin(self, phase: str, total_bytes: int) -> None:
        self._phase, self._started_s = phase, time.monotonic()
        self._task = self._bars.add_task(phase, total=total_bytes or None)
        if not self._console.is_terminal:
            size = f" {total_bytes / GIGABYTE:.2f} GB" if total_bytes else ""
            self._console.print(f"{phase}{size} ...")

    def _end(self, total_bytes: int) -> None:
        seconds = time.monotonic() - self._started_s
        self._console.print(f"{self._phase}: {total_bytes / GIGABYTE:.2f} GB in {seconds:.1f} s")
        self._phase, self._task = "", None
