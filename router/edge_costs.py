"""What a hand-off from P to D costs, learned per pair: seconds = base + bytes x slope.

1. A hand-off is over: `note` takes its bytes and how long the client's stream stood still for it (token 0 was
   there, the next could not be computed).
2. The pair's entry in the fleet's columns is fitted anew: least squares with forgetting, nothing below 0.
3. Pairs that never met are cold: their first hand-off also builds the edge.

Pure, without a clock.
"""

from __future__ import annotations

import numpy as np

from router.fleet import EXPOSED, Column, EdgeRow, Fleet

_MEMORY = 0.95  # weight of what was, for each hand-off


class _Line:
    """Least squares over the recent points (bytes, seconds)."""

    __slots__ = ("n", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.n = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, x: float, y: float) -> None:
        self.n = self.n * _MEMORY + 1
        self.x = self.x * _MEMORY + x
        self.xx = self.xx * _MEMORY + x * x
        self.y = self.y * _MEMORY + y
        self.xy = self.xy * _MEMORY + x * y

    def fit(self, slope: float) -> tuple[float, float]:
        """(base, slope), both at least 0; `slope` where the points are too alike to tell."""
        spread = self.n * self.xx - self.x * self.x
        if spread > 1e-3 * self.n * self.xx:
            slope = max(0.0, (self.n * self.xy - self.x * self.y) / spread)
        base = (self.y - slope * self.x) / self.n
        if base < 0:
            return 0.0, self.xy / self.xx if self.xx > 0 else 0.0
        return base, slope


class EdgeCosts:
    """Owns the fleet's `edges`."""

    def __init__(self, fleet: Fleet, handoff_s: float, cold_s: float) -> None:
        self._fleet = fleet
        self._cold_base_s = handoff_s + cold_s
        self._lines: dict[int, dict[int, _Line]] = {}  # prefill row |-> decode row |-> hand-offs

    def note(self, prefill: int, decode: int, num_bytes: float, exposed_s: float) -> None:
        fleet = self._fleet
        edge = fleet.edges.get(prefill)
        if edge is None:
            edge = fleet.edges[prefill] = EdgeRow(self._cold_base(), EXPOSED / fleet.bytes_s)
        line = self._lines.setdefault(prefill, {}).setdefault(decode, _Line())
        line.add(num_bytes, exposed_s)
        edge.base_s[decode], edge.byte_s[decode] = line.fit(EXPOSED / float(fleet.bytes_s[decode]))

    def leave(self, row: int) -> None:
        """The worker of this row is gone; whoever takes the row has no edge yet."""
        self._fleet.edges.pop(row, None)
        self._lines.pop(row, None)
        for prefill, edge in self._fleet.edges.items():
            self._chill(edge, row)
            self._lines[prefill].pop(row, None)

    def joined(self, row: int) -> None:
        """A worker has this row now; the fleet may have grown for it."""
        fleet = self._fleet
        for prefill, edge in fleet.edges.items():
            more = fleet.num_workers - len(edge.base_s)
            if more:
                edge = fleet.edges[prefill] = EdgeRow(
                    np.append(edge.base_s, np.full(more, self._cold_base_s)),
                    np.append(edge.byte_s, EXPOSED / fleet.bytes_s[-more:]),
                )
            self._chill(edge, row)

    def _chill(self, edge: EdgeRow, row: int) -> None:
        edge.base_s[row] = self._cold_base_s
        edge.byte_s[row] = EXPOSED / self._fleet.bytes_s[row]

    def _cold_base(self) -> Column:
        return np.full(self._fleet.num_workers, self._cold_base_s)
