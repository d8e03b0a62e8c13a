"""Server-sent events from bytes: however the bytes were cut, the same events come out. No IO.

1. Bytes are added to what was left of the last ones and cut into lines; lines end with LF, CRLF or CR.
2. `data:` lines are collected (several lines of one event are joined with LF); comments (`: ping`) and other
   fields are left out.
3. An empty line ends the event. The end of the body ends a last event that lacks it: some servers close right
   after their last line.
"""

from __future__ import annotations

from cluster.errors import ProtocolError

MAX_LINE_BYTES = 8 << 20


class SseLines:
    """One body's events, in order."""

    __slots__ = ("_after_cr", "_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: bytes | None = None
        self._after_cr = False  # the last line ended with CR: an LF that follows belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes.

        Raises:
            ProtocolError: a line longer than `MAX_LINE_BYTES`.
        """
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if self._tail:
            data = self._tail + data
            self._tail = b""
        lines = data.splitlines()
        if not data.endswith(b"\n"):
            if data.endswith(b"\r"):
                self._after_cr = True
            elif lines:
                self._tail = lines.pop()
                if len(self._tail) > MAX_LINE_BYTES:
                    raise ProtocolError(f"an event line is longer than {MAX_LINE_BYTES} bytes")
        events = []
        pending = self._data
        for line in lines:
            if line.startswith(b"data:"):
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                pending = value if pending is None else pending + b"\n" + value
            elif not line and pending is not None:
                events.append(pending)
                pending = None
        self._data = pending
        return events

    def finish(self) -> list[bytes]:
        """The event that the body's end completes, if one was begun."""
        return self.feed(b"\n\n")
