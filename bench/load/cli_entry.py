"""`baton bench` in a process of its own: who hears its signals from the first import to the exit status.

1. The signals are taken first: one that comes while the command is imported or checked ends it with one line.
2. The command runs; once it measures, signals only end its runs (`client.interrupts`).
3. Once its status is decided, signals do nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.load.client.interrupts import CommandSignals


def main(arguments: Sequence[str], owns_process: bool) -> None:
    """
    Args:
        owns_process: nothing else happens in this process, and nothing will: its signals are the command's.

    Raises:
        SystemExit: always, with the command's status, unless it is an error.
        BatonError: the command's one sentence.
    """
    signals = CommandSignals()
    if owns_process:
        signals.take()
    try:
        from bench.load.cli import app  # half a second, in which a signal may come

        app(args=list(arguments), prog_name="baton bench")
    finally:
        if owns_process:
            signals.ignore()
