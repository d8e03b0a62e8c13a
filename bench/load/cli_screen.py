"""What a command prints. Its result is worth more than its words: an output that cannot be written is told on
standard error, if that still works, and ends nothing. What a terminal's encoding lacks is printed as `?`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TextIO


def say(lines: Iterable[str]) -> None:
    """Print to standard output."""
    error = _write(sys.stdout, lines)
    if error is not None:
        note(f"standard output cannot be written ({error.strerror or error})")


def note(text: str) -> None:
    """One line to standard error."""
    _write(sys.stderr, [text])


def _write(stream: TextIO | None, lines: Iterable[str]) -> OSError | None:
    """The error, if there was one; nothing is written to that stream any more then."""
    if stream is None:  # closed before the program began
        return None
    encoding = stream.encoding or "utf-8"
    text = "".join(f"{line}\n" for line in lines).encode(encoding, "replace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _silence(stream)
        return error
    return None


def _silence(stream: TextIO) -> None:
    """What is still in its buffer goes nowhere, so that the end of the program does not stumble over it."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
