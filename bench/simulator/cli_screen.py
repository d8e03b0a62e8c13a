"""How `baton simulate --trace` and `baton plan` speak: what a user wrote, or what is in the user's file, is
shown as text. It is no markup, and nothing that a terminal would obey. A run that takes long says how
far it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

import typer

from cluster.readable import visible


def line(text: str) -> None:
    """A line of the result."""
    typer.echo(visible(text))


def warn(text: str) -> None:
    """What a reader of the result should know."""
    typer.secho(visible(text), fg="yellow", err=True)


def fail(error: Exception) -> None:
    """Why the command cannot work."""
    typer.secho(f"{visible(str(error).rstrip('.'))}.", fg="red", err=True)


class Progress:
    """How far a run is, on standard error: on a terminal one line that is written anew, else a line from time
    to time. Runs of a moment say nothing."""

    ON_TERMINAL_S, ELSEWHERE_S = 0.5, 15.0

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._every_s = self.ON_TERMINAL_S if self._is_terminal else self.ELSEWHERE_S
        self._told_s = clock()
        self._is_shown = False

    def update(self, text: Callable[[], str]) -> None:
        """`text` is asked for when it is time for it."""
        now = self._clock()
        if now - self._told_s < self._every_s:
            return
        self._told_s = now
        self._is_shown = self._is_terminal
        self._stream.write(f"\r\x1b[K{text()}" if self._is_terminal else f"{text()}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Before anything else is printed."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._is_shown = False
        self._told_s = self._clock()
