"""What drives a search: a probe that cannot be offered costs only itself."""

from __future__ import annotations

import pytest

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.goodput.probing import find_max_goodput
from bench.load.goodput.values import Probe, SearchSettings
from bench.load.runner import Measurement
from cluster.errors import BatonError
from tests.bench.load.load_values import plan_of, steady_run


def measured(probe: Probe, number: int) -> Measurement:
    """The third one finds too few rows in its trace, say."""
    if number >= 2:
        raise BatonError("the trace has too few rows")
    run = steady_run(20)
    return Measurement(plan_of(run), run, summarize(run, parse_slos("ttft=1s")), {"valid": True})


def test_a_later_probe_that_cannot_be_offered_keeps_what_was_found() -> None:
    found, measurements = find_max_goodput(SearchSettings(start_rate=1.0), measured, lambda *_: None)
    assert len(measurements) == len(found["probes"]) == 2
    assert not found["is_complete"]
    (reason,) = found["incomplete_reasons"]
    assert (
        reason
        == found["notes"][-1]
        == "The probe at 4 req/s could not be offered: the trace has too few rows"
    )


def test_a_first_probe_that_cannot_be_offered_is_an_error() -> None:
    with pytest.raises(BatonError, match="too few rows"):
        find_max_goodput(
            SearchSettings(start_rate=1.0),
            lambda probe, number: measured(probe, 2),
            lambda *_: None,
        )
