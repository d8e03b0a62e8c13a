"""The requests of a long run as they come, one window of time after the other: none is made before it is due.

They are those of `bench.simulator.fleet.workload.make_requests` with Poisson arrivals: same seed, same rows,
same times. Every process of a run draws all of them, and makes a `Request` of its own ones only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.request import Request
from bench.simulator.fleet.workload import ROUND_IDS


class Arrival(msgspec.Struct, frozen=True):
    index: int
    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]

    def request(self) -> Request:
        return Request(self.index, self.at_s, self.num_prompt, self.num_output, self.blocks)


class Stream:
    """All arrivals at `rate` per second before `end_s`, in order."""

    def __init__(self, rows: Sequence[TraceRow], rate: float, end_s: float, seed: int) -> None:
        self._rows = [(row.input_tokens, row.output_tokens, row.hash_ids or ()) for row in rows]
        self._end_s = end_s
        self._arrivals = self._draw(rate, seed)
        self._next: Arrival | None = next(self._arrivals)

    def until(self, until_s: float) -> Iterator[Arrival]:
        """Those not given out yet that come before `until_s`."""
        until_s = min(until_s, self._end_s)
        while self._next is not None and self._next.at_s < until_s:
            arrival = self._next
            self._next = next(self._arrivals)
            yield arrival

    def _draw(self, rate: float, seed: int) -> Iterator[Arrival]:
        draw = random.Random(seed)
        rows = self._rows
        at = draw.randrange(len(rows))
        index, lap, now_s = 0, 0, 0.0
        while True:
            now_s += draw.expovariate(rate)
            num_prompt, num_output, blocks = rows[at]
            if lap and blocks:
                blocks = tuple([block + lap * ROUND_IDS for block in blocks])
            yield Arrival(index, now_s, num_prompt, num_output, blocks)
            index, at = index + 1, at + 1
            if at == len(rows):
                at, lap = 0, lap + 1
