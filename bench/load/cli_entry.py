"""`baton bench` in a process of its own: who hears its signals from the first import to the exit status.

1. The signals are taken first: one that comes while the command is imported or checked ends it with one line.
2. The command runs; once it measures, signals only end its runs (`client.interrupts`). A command line that
   cannot work is one line and the status of such.
3. Once its status is decided, signals do nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.load.client.interrupts import CommandSignals
from cluster.errors import ConfigError


def main(arguments: Sequence[str], owns_process: bool) -> None:
    """
    Args:
        owns_process: nothing else happens in this process, and nothing will: its signals are the command's.

    Raises:
        SystemExit: always, with the command's status (`cli_status`), unless it is an error.
        BatonError: the error's one sentence.
    """
    signals = CommandSignals()
    if owns_process:
        signals.take()
    try:
        from bench.load.cli import app  # half a second, in which a signal may come

        app(args=list(arguments), prog_name="baton bench")
    except ConfigError as error:
        from bench.load.cli_screen import note
        from bench.load.cli_status import Status

        note(f"error: {error}")
        raise SystemExit(Status.USAGE) from None
    finally:
        if owns_process:
            signals.ignore()
