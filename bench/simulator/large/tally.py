"""What became of the requests of a long run, summed up as they end: by the definitions of
`bench.simulator.fleet.trial`, in memory that does not grow with the run.

A request counts as offered when it arrives in the measured part of the run, and as good if it ends within
every target before the run does. One that is refused or never ends is good for nothing. Distributions are of
the requests that ended; those of first tokens lack the few that had one and did not end before the run did.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from bench.load.figures.metrics import DEFAULT_PERCENTILES
from bench.simulator.fleet.request import Request
from bench.simulator.large.quantiles import Collected, Quantiles
from cluster.slo_classes import Targets

NAMES = ("ttft", "tpot", "gap", "e2el")
_AT_ONCE = 5_000


class Counts(msgspec.Struct):
    num_arrived: int = 0  # in all of the run
    num_offered: int = 0  # in its measured part, as the following
    num_rejected: int = 0
    num_finished: int = 0
    num_good: int = 0
    num_in_ttft: int = 0
    num_in_tpot: int = 0
    num_in_gap: int = 0
    output_tokens: int = 0


class Tallied(msgspec.Struct):
    """What a process hands over."""

    counts: Counts
    figures: dict[str, Collected]


class Tally:
    """Owns the sums of one process. Ended requests are kept as rows of numbers until there are `_AT_ONCE`."""

    def __init__(self, targets: Targets, from_s: float, until_s: float) -> None:
        self._counts = Counts()
        self._targets = targets
        self._from_s, self._until_s = from_s, until_s
        self._figures = tuple(Quantiles() for _ in NAMES)
        self._rows: list[tuple[float, float, float, float, int]] = []  # as NAMES; output tokens

    def arrived(self, arrival_s: float) -> None:
        self._counts.num_arrived += 1
        if self._from_s <= arrival_s <= self._until_s:
            self._counts.num_offered += 1

    def rejected(self, arrival_s: float) -> None:
        if self._from_s <= arrival_s <= self._until_s:
            self._counts.num_rejected += 1

    def ended(self, request: Request) -> None:
        """It has its last token."""
        arrival_s, first_s, finish_s = request.arrival_s, request.first_s, request.finish_s
        if not self._from_s <= arrival_s <= self._until_s:
            return
        assert first_s is not None
        assert finish_s is not None
        ttft_s, tpot_s, gap_s = first_s - arrival_s, request.tpot_s, request.worst_gap_s
        self._rows.append((ttft_s, tpot_s, gap_s, finish_s - arrival_s, request.num_output))
        if len(self._rows) >= _AT_ONCE:
            self._sum_up()

    def counts(self) -> Counts:
        self._sum_up()
        return self._counts

    def tallied(self) -> Tallied:
        counts = self.counts()
        return Tallied(
            counts, {name: one.collected() for name, one in zip(NAMES, self._figures, strict=True)}
        )

    def _sum_up(self) -> None:
        """An answer of one token has neither pace nor gap, and meets any target for them."""
        if not self._rows:
            return
        ttft_s, tpot_s, gap_s, e2e_s, tokens = np.array(self._rows).T
        self._rows.clear()
        counts, targets, has_more = self._counts, self._targets, tokens > 1
        is_early = ttft_s <= targets.ttft_s
        is_paced = (tpot_s <= targets.tpot_s) | ~has_more
        is_even = (gap_s <= targets.gap_s) | ~has_more
        counts.num_finished += len(tokens)
        counts.output_tokens += int(tokens.sum())
        counts.num_in_ttft += int(is_early.sum())
        counts.num_in_tpot += int(is_paced.sum())
        counts.num_in_gap += int(is_even.sum())
        counts.num_good += int((is_early & is_paced & is_even).sum())
        samples = (ttft_s, tpot_s[has_more], gap_s[has_more], e2e_s)
        for figure, values in zip(self._figures, samples, strict=True):
            figure.add(values)


def total(parts: Iterable[Tallied]) -> tuple[Counts, dict[str, Quantiles]]:
    """Of all processes."""
    parts = list(parts)
    counts = Counts(*map(sum, zip(*(msgspec.structs.astuple(one.counts) for one in parts), strict=True)))
    return counts, {name: Quantiles.merged(one.figures[name] for one in parts) for name in NAMES}


def distributions(figures: dict[str, Quantiles]) -> dict[str, dict[str, float | int | bool | None]]:
    return {name: one.figures(DEFAULT_PERCENTILES) for name, one in figures.items()}
