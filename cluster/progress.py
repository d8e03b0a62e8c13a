"""How `baton serve` looks in a terminal: phases with their seconds, a bar while a model is converted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.clock import Clock

GIGABYTE = 1e9


class TerminalReport:
    """A `cluster.launch_driver.Report` for people; `on_ready` is printed when everything serves."""

    def __init__(self, console: Console, clock: Clock, ready_text: Callable[[float], str]) -> None:
        self._console = console
        self._clock = clock
        self._ready_text = ready_text
        self._started_at = clock.now()
        self._phase: tuple[str, float] | None = None
        self._bar: tuple[Progress, TaskID] | None = None
        self._lock = threading.Lock()  # progress comes from another thread

    def phase(self, name: str) -> None:
        with self._lock:
            self._end_phase()
            self._phase = (name, self._clock.now())

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            if total_bytes <= 0:
                return
            if self._bar is None:
                progress = Progress(
                    TextColumn("  {task.description}"),
                    BarColumn(),
                    TextColumn("{task.fields[size]}"),
                    TimeElapsedColumn(),
                    console=self._console,
                    transient=True,
                )
                self._bar = (progress, progress.add_task(phase, total=total_bytes, size=""))
                progress.start()
            progress, task = self._bar
            size = f"{done_bytes / GIGABYTE:.2f} of {total_bytes / GIGABYTE:.2f} GB"
            progress.update(task, description=phase, completed=done_bytes, total=total_bytes, size=size)
            if done_bytes >= total_bytes:
                self._end_bar()

    def say(self, text: str) -> None:
        with self._lock:
            self._console.print(f"[yellow]![/] {escape(text)}")

    def ready(self) -> None:
        with self._lock:
            self._end_phase()
            self._console.print(self._ready_text(self._clock.now() - self._started_at))

    def close(self) -> None:
        with self._lock:
            self._end_bar()

    def _end_phase(self) -> None:
        if self._phase is not None:
            name, started_at = self._phase
            self._end_bar()
            self._console.print(f"[green]✓[/] {name} [dim]{self._clock.now() - started_at:.1f} s[/]")
        self._phase = None

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
        self._bar = None
