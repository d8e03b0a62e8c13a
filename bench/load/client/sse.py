"""Server-sent events from bytes: however the bytes were cut, the same events come out. No IO.

1. Bytes are added to what was left of the last ones and cut into lines; lines end with LF, CRLF or CR. A byte
   order mark before the first line is left out.
2. `data:` lines are collected (several lines of one event are joined with LF). `event: error` marks the
   event; llama.cpp's field `error:` is data of an event so marked. Comments (`: ping`), other names and other
   fields are left out.
3. An empty line ends the event. The end of the body ends a last event that lacks it: some servers close right
   after their last line.
"""

from __future__ import annotations

from typing import NamedTuple

from cluster.errors import ProtocolError

MAX_LINE_BYTES = 8 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    data: bytes
    is_error: bool = False  # by its name


class SseLines:
    """One body's events, in order."""

    __slots__ = ("_after_cr", "_data", "_is_at_start", "_is_error", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: bytes | None = None
        self._is_error = False
        self._is_at_start = True
        self._after_cr = False  # the last line ended with CR: an LF that follows belongs to it

    def feed(self, data: bytes) -> list[Event]:
        """Every event that `data` completes.

        Raises:
            ProtocolError: a line longer than `MAX_LINE_BYTES`.
        """
        events = []
        pending = self._data
        for line in self._lines(data):
            if line.startswith(b"data:"):
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                pending = value if pending is None else pending + b"\n" + value
            elif not line:
                if pending is not None or self._is_error:
                    events.append(Event(pending or b"", self._is_error))
                pending = None
                self._is_error = False
            elif line.startswith(b"error:"):
                pending = line[6:] if pending is None else pending + b"\n" + line[6:]
                self._is_error = True
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
        self._data = pending
        return events

    def finish(self) -> list[Event]:
        """The event that the body's end completes, if one was begun."""
        return self.feed(b"\n\n")

    def _lines(self, data: bytes) -> list[bytes]:
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
        if self._is_at_start and lines:
            self._is_at_start = False
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        return lines
