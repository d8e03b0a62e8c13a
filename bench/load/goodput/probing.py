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


def find_max_goodput(
    settings: SearchSettings, measure: MeasureProbe, on_probe: OnProbe
) -> tuple[dict[str, Any], list[Measurement]]:
    """The search's dict (settings, answers, probes) and every measurement, in order.

    An interrupted probe ends the search, and so does one in which the server went away, or a later one that
    cannot be built (a trace with too few rows, say); its answers then say that they are unfinished.

    Raises:
        BatonError: the first probe cannot be built.
    """
    search = GoodputSearch(settings)
    measurements: list[Measurement] = []
    failures: list[str] = []
    is_complete = True
    while is_complete and (probe := search.next()) is not None:
        try:
            measurement = measure(probe, len(measurements))
        except BatonError as error:
            if not measurements:
                raise
            is_complete = False
            failures.append(f"The probe at {probe.rate:.4g} req/s could not be offered: {error}")
            break
        measurements.append(measurement)
        if not measurement.run.is_complete:
            is_complete = False
        elif (lost := server_lost(measurement.run)) is not None:
            is_complete = False
            failures.append(
                f"The search ended with its probe at {probe.rate:.4g} req/s, seed {probe.seed}, which proves "
                f"nothing and is in no figure: {lost}."
            )
        else:
            outcome = outcome_of(measurement)
            search.report(probe, outcome)
            on_probe(probe, outcome, search)
    found = to_dict(search)
    found["notes"] += failures
    reasons = failures if is_complete or failures else ["It was interrupted."]
    return found | {"is_complete": is_complete, "incomplete_reasons": reasons}, measurements
