"""How many probes a search will take, before it begins: it is played against servers that are easily told.
Pure.

1. Such a server meets every SLO up to some rate, and from there on fewer the more is asked of it.
2. Servers of several such rates, from an eighth of the search's first rate to 64 times that, give the range.
3. Seeds beyond the fourth take what the fourth takes.
"""

from __future__ import annotations

import math

import msgspec

from bench.load.goodput.search import GoodputSearch
from bench.load.goodput.values import ProbeOutcome, SearchSettings

RATES = tuple(1.1 * 2.0**power for power in range(-3, 7))  # times the first rate
MOST_SEEDS = 4  # played
SLOPE = 0.3  # of the share of good requests, per factor e above the rate


def likely_probes(settings: SearchSettings) -> tuple[int, int]:
    """The fewest and the most that it takes of these servers; no more than `max_probes`."""
    counts = [_probes_of(settings, settings.start_rate * times) for times in RATES]
    return min(counts), max(counts)


def _probes_of(settings: SearchSettings, full_rate: float) -> int:
    rest = len(settings.seeds) - MOST_SEEDS
    if rest <= 0:
        return _play(settings, full_rate)
    some, fewer = (
        _play(msgspec.structs.replace(settings, seeds=settings.seeds[:num]), full_rate)
        for num in (MOST_SEEDS, MOST_SEEDS - 1)
    )
    return min(settings.max_probes, some + rest * (some - fewer))


def _play(settings: SearchSettings, full_rate: float) -> int:
    search = GoodputSearch(settings)
    while (probe := search.next()) is not None:
        share = 1.0 if probe.rate <= full_rate else max(0.0, 1 - SLOPE * math.log(probe.rate / full_rate))
        search.report(probe, ProbeOutcome(attainment=share, num_offered=100))
    return len(search.log)
