"""How the processes of a long run tell one another how loaded their cells are, once per window.

Each pair of processes has a socket pair. A message is the window's number and the loads of the sender's
cells, a row of numbers each. A process needs what the others said two windows ago, so it waits only for one
that is that far behind; then until a deadline.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from cluster.errors import BatonError
from router.cells import CellLoad

DEADLINE_S = 300.0
_FIGURES = len(CellLoad.__struct_fields__)
_HEADER = struct.Struct("<qq")  # window, cells


class Link:
    """One process's end of the way to another one."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(DEADLINE_S)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        self._end = end

    def send(self, window: int, loads: Sequence[CellLoad]) -> None:
        """
        Raises:
            BatonError: the other process is gone, or has stood still.
        """
        table = np.array([msgspec.structs.astuple(load) for load in loads], dtype=np.float64)
        try:
            self._end.sendall(_HEADER.pack(window, len(loads)) + table.tobytes())
        except OSError as error:
            raise _lost(error) from error

    def receive(self, window: int) -> list[CellLoad]:
        """What the other said at the end of `window`, the next it has not been asked for.

        Raises:
            BatonError: as `send`.
        """
        number, num_cells = _HEADER.unpack(self._read(_HEADER.size))
        assert number == window, (number, window)
        content = self._read(num_cells * _FIGURES * 8)
        table = np.frombuffer(content, dtype=np.float64).reshape(num_cells, _FIGURES)
        return [CellLoad(*row) for row in table.tolist()]

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                more = self._end.recv(size - len(content))
            except OSError as error:
                raise _lost(error) from error
            if not more:
                raise _lost(None)
            content += more
        return content


def _lost(error: OSError | None) -> BatonError:
    if isinstance(error, TimeoutError):
        return BatonError(f"Another process of this run has stood still for {DEADLINE_S:.0f} s.")
    return BatonError("Another process of this run has ended before its time; what it said is above.")
