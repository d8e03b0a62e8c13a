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

MAX_EVENT_BYTES = 8 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    data: bytes
    is_error: bool = False  # by its name


class SseLines:
    """One body's events, in order. What is unfinished is kept in parts: a long line or event costs what its
    bytes cost, however many reads bring it.
    """

    __slots__ = ("_after_cr", "_data", "_data_bytes", "_is_at_start", "_is_error", "_tail", "_tail_bytes")

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # of an unfinished line
        self._tail_bytes = 0
        self._data: list[bytes] | None = None  # lines of an unfinished event
        self._data_bytes = 0  # read since it began, about
        self._is_error = False
        self._is_at_start = True
        self._after_cr = False  # the last line ended with CR: an LF that follows belongs to it

    def feed(self, data: bytes) -> list[Event]:
        """Every event that `data` completes.

        Raises:
            ProtocolError: an event longer than `MAX_EVENT_BYTES`.
        """
        events = []
        pending = self._data
        for line in self._lines(data):
            if line.startswith(b"data:"):
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                if pending is None:
                    pending = [value]
                else:
                    pending.append(value)
            elif not line:
                if pending is not None or self._is_error:
                    whole = pending[0] if pending and len(pending) == 1 else b"\n".join(pending or ())
                    events.append(Event(whole, self._is_error))
                pending = None
                self._is_error = False
            elif line.startswith(b"error:"):
                pending = [*(pending or ()), line[6:]]
                self._is_error = True
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
        self._data = pending
        self._data_bytes = 0 if pending is None else self._data_bytes + len(data)
        if self._data_bytes > MAX_EVENT_BYTES or self._tail_bytes > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def finish(self) -> list[Event]:
        """The event that the body's end completes, if one was begun."""
        return self.feed(b"\n\n")

    def _lines(self, data: bytes) -> list[bytes]:
        """Those that `data` completes."""
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        lines = data.splitlines()
        if not lines:
            return lines
        is_ended = data.endswith(b"\n")
        if not is_ended and data.endswith(b"\r"):
            is_ended = self._after_cr = True
        if self._tail:
            if len(lines) == 1 and not is_ended:
                self._keep(data)
                return []
            lines[0] = b"".join((*self._tail, lines[0]))
            self._tail, self._tail_bytes = [], 0
        if not is_ended:
            self._keep(lines.pop())
        if self._is_at_start and lines:
            self._is_at_start = False
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        return lines

    def _keep(self, part: bytes) -> None:
        self._tail.append(part)
        self._tail_bytes += len(part)
