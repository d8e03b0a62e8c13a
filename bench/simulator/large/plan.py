"""What a long run is, in values that can be told to another process: `Plan`; and what follows from it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.load.figures.slo import parse_slos
from bench.load.plans.trace_formats import TraceRow
from bench.load.plans.traces import read_trace
from bench.simulator.fleet.trial import COOL_DOWN, WARM_UP, targets_of
from bench.simulator.hardware import Hardware, parse_pool
from cluster.slo_classes import Targets

NUM_MADE_ROWS = 20_000
# Lengths as in the Azure conversation trace of 2023: (mean, deviation of the logarithm, most) of log-normals.
MADE_INPUT, MADE_OUTPUT = (1_155.0, 1.1, 14_050), (211.0, 0.95, 1_000)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`trace` None: made rows. `window_s`: how often cells say how loaded they are; a choice goes by what
    they said one to two windows ago."""

    workers: int
    hardware: str
    rate: float
    seconds: float  # of arrivals
    slo: str
    seed: int
    cell_workers: int
    window_s: float
    prefix_cache: bool = True
    trace: str | None = None

    def rows(self) -> Sequence[TraceRow]:
        return made_rows() if self.trace is None else read_trace(Path(self.trace)).rows

    def pool(self) -> list[Hardware]:
        return parse_pool(self.hardware, self.workers)

    def targets(self) -> Targets:
        return targets_of(parse_slos(self.slo))

    @property
    def num_cells(self) -> int:
        """As many as have about `cell_workers` each."""
        return max(1, round(self.workers / self.cell_workers))

    def cell_pool(self, pool: Sequence[Hardware], cell: int) -> Sequence[Hardware]:
        """Workers are dealt to cells in turn, so each cell has its share of each kind."""
        return pool[cell :: self.num_cells]

    @property
    def measured_s(self) -> tuple[float, float]:
        """From when to when arrivals are measured."""
        return self.seconds * WARM_UP, self.seconds * (1 - COOL_DOWN)


def made_rows() -> list[TraceRow]:
    """Prompts and answers of log-normal length, without shared prefixes; always the same."""
    draw = random.Random("made rows")

    def length(mean: float, deviation: float, most: int) -> int:
        middle = mean * math.exp(-deviation * deviation / 2)
        return max(1, min(most, round(middle * draw.lognormvariate(0.0, deviation))))

    return [TraceRow(index / 5, length(*MADE_INPUT), length(*MADE_OUTPUT)) for index in range(NUM_MADE_ROWS)]
