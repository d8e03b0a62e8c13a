"""What became of the requests of a long run, summed up as they end: by the definitions of
`bench.simulator.fleet.trial`, in memory that does not grow with the run.

A request counts as offered when it arrives in the measured part of the run, and as good if it ends within
every target before the run does; one that is refused or never ends is good for nothing, and in no
distribution but that of first tokens, if it had one. (First tokens of requests that never end are not seen:
at most those in flight at the very end.)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bench.load.figures.metrics import DEFAULT_PERCENTILES
from bench.simulator.fleet.request import Request
from bench.simulator.large.quantiles import Collected, Quantiles
from cluster.slo_classes import Targets

NAMES = ("ttft", "tpot", "gap", "e2el")


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
    """Owns the sums of one process."""

    def __init__(self, targets: Targets, from_s: float, until_s: float) -> None:
        self.counts = Counts()
        self._targets = targets
        self._from_s, self._until_s = from_s, until_s
        self._ttft, self._tpot, self._gap, self._e2e = (Quantiles() for _ in NAMES)

    def _is_measured(self, arrival_s: float) -> bool:
        return self._from_s <= arrival_s <= self._until_s

    def arrived(self, arrival_s: float) -> None:
        self.counts.num_arrived += 1
        if self._is_measured(arrival_s):
            self.counts.num_offered += 1

    def rejected(self, arrival_s: float) -> None:
        if self._is_measured(arrival_s):
            self.counts.num_rejected += 1

    def ended(self, request: Request) -> None:
        """It has its last token."""
        arrival_s = request.arrival_s
        if not self._is_measured(arrival_s):
            return
        counts, targets = self.counts, self._targets
        assert request.first_s is not None
        assert request.finish_s is not None
        ttft_s = request.first_s - arrival_s
        is_good = ttft_s <= targets.ttft_s
        counts.num_finished += 1
        counts.num_in_ttft += is_good
        counts.output_tokens += request.num_output
        self._ttft.add(ttft_s)
        self._e2e.add(request.finish_s - arrival_s)
        if request.num_output > 1:
            tpot_s, gap_s = request.tpot_s, request.worst_gap_s
            self._tpot.add(tpot_s)
            self._gap.add(gap_s)
            is_paced, is_even = tpot_s <= targets.tpot_s, gap_s <= targets.gap_s
        else:
            is_paced = is_even = True
        counts.num_in_tpot += is_paced
        counts.num_in_gap += is_even
        counts.num_good += is_good and is_paced and is_even

    def tallied(self) -> Tallied:
        quantiles = (self._ttft, self._tpot, self._gap, self._e2e)
        return Tallied(
            self.counts, {name: one.collected() for name, one in zip(NAMES, quantiles, strict=True)}
        )


def total(parts: Iterable[Tallied]) -> tuple[Counts, dict[str, Quantiles]]:
    """Of all processes."""
    parts = list(parts)
    counts = Counts(*map(sum, zip(*(msgspec.structs.astuple(one.counts) for one in parts), strict=True)))
    return counts, {name: Quantiles.merged(one.figures[name] for one in parts) for name in NAMES}


def distributions(figures: dict[str, Quantiles]) -> dict[str, dict[str, float | int | bool | None]]:
    return {name: one.figures(DEFAULT_PERCENTILES) for name, one in figures.items()}
