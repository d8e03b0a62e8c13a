"""Lines out of what a process prints, however the pipe cuts it."""

from __future__ import annotations

from typing import Final

MAX_LINE_BYTES: Final = 4096


class OutputLines:
    """Longer lines are cut at `MAX_LINE_BYTES`; empty ones are left out. `last` is the latest one."""

    def __init__(self) -> None:
        self._rest = b""
        self.last = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes; b"" says that the output is over, so what is left is one."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data:
            whole, self._rest = [*whole, self._rest], b""
        pieces = [line[start : start + MAX_LINE_BYTES] for line in whole for start in _starts(line)]
        while len(self._rest) > MAX_LINE_BYTES:
            pieces.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        lines = [text for piece in pieces if (text := piece.decode(errors="replace").rstrip())]
        if lines:
            self.last = lines[-1]
        return lines


def _starts(line: bytes) -> range:
    return range(0, len(line), MAX_LINE_BYTES)
