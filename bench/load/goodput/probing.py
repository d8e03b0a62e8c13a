"""Drives the max-goodput search: each probe is one measured run at a rate and a seed.

1. `GoodputSearch` says the next (rate, seed).
2. The plan is re-aimed at that rate (`at_rate`), with a salt of its own: no probe finds its prompts cached.
3. A probe in which the server could not be reached, or after which it no longer answers, proves nothing: it
   is not reported, and the search ends.
4. Its attainment, over all requests offered in the window, is reported back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.load.figures.outage import was_unreachable
from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import Probe, ProbeOutcome, SearchSettings
from bench.load.records import RunRecord
from bench.load.runner import Measurement
from cluster.errors import BatonError

MeasureProbe = Callable[[Probe, int], Measurement]  # (probe, its number from 0) -> what was measured
OnProbe = Callable[[Probe, ProbeOutcome, GoodputSearch], None]


def outcome_of(measurement: Measurement) -> ProbeOutcome:
    goodput = measurement.summary.goodput
    return ProbeOutcome(
        attainment=None if goodput is None else goodput.attainment,
        num_offered=measurement.summary.num_offered,
        valid=bool(measurement.result["valid"]),
    )


def server_lost(run: RunRecord) -> str | None:
    """Why this run says nothing about the load it offered: its server went away. None: it did not."""
    if run.server_gone is not None:
        return f"the server no longer answers: {run.server_gone}"
    if was_unreachable(run):
        return "the server could not be reached for a time, and answers again"
    return None


class ProbedSearch:
    """A search and what was measured for it, one probe after the other; others may be measured in between.

    An interrupted probe ends the search, and so does one in which the server went away, or a later one that
    cannot be offered (a trace with too few rows, say); its answers then say that they are unfinished.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.measurements: list[Measurement] = []
        self._search = GoodputSearch(settings)
        self._failures: list[str] = []
        self._is_complete = True

    def next(self) -> Probe | None:
        """The probe to run now. None: the search is over."""
        return self._search.next() if self._is_complete else None

    def step(self, measure: MeasureProbe, on_probe: OnProbe) -> None:
        """Run the probe that `next` gave.

        Raises:
            BatonError: the first probe cannot be offered.
        """
        probe = self._search.next()
        assert probe is not None, "the search is over"
        try:
            measurement = measure(probe, len(self.measurements))
        except BatonError as error:
            if not self.measurements:
                raise
            self._end(f"The probe at {probe.rate:.4g} req/s could not be offered: {error}")
            return
        self.measurements.append(measurement)
        if not measurement.run.is_complete:
            self._is_complete = False
        elif (lost := server_lost(measurement.run)) is not None:
            self._end(
                f"The search ended with its probe at {probe.rate:.4g} req/s, seed {probe.seed}, which proves "
                f"nothing and is in no figure: {lost}."
            )
        else:
            outcome = outcome_of(measurement)
            self._search.report(probe, outcome)
            on_probe(probe, outcome, self._search)

    def account(self) -> dict[str, Any]:
        """The search's dict: settings, answers, probes."""
        found = to_dict(self._search)
        found["notes"] += self._failures
        reasons = self._failures if self._is_complete or self._failures else ["It was interrupted."]
        return found | {"is_complete": self._is_complete, "incomplete_reasons": reasons}

    def _end(self, failure: str) -> None:
        self._is_complete = False
        self._failures.append(failure)


def find_max_goodput(
    settings: SearchSettings, measure: MeasureProbe, on_probe: OnProbe
) -> tuple[dict[str, Any], list[Measurement]]:
    """A whole search (`ProbedSearch`) at once: its dict and every measurement, in order.

    Raises:
        BatonError: the first probe cannot be offered.
    """
    search = ProbedSearch(settings)
    while search.next() is not None:
        search.step(measure, on_probe)
    return search.account(), search.measurements
