"""Exit statuses as a table: what of the results decides, and which of several that hold."""

from __future__ import annotations

from typing import Any

import pytest

from bench.load.cli_status import EXIT_HELP, MEANINGS, Status, exit_status, search_status
from bench.load.client.interrupts import StopSwitch
from bench.load.goodput.search import GoodputSearch, to_dict
from bench.load.goodput.values import ProbeOutcome, SearchSettings

GOOD = {"is_complete": True, "num_prompts": 5, "completed": 5, "valid": True, "slo_attainment": 0.95}


def switch(num_stops: int = 0) -> StopSwitch:
    made = StopSwitch()
    made.num_stops = num_stops
    return made


@pytest.mark.parametrize(
    ("changes", "strict_share", "num_stops", "num_wanted", "status"),
    [
        ({}, None, 0, 1, Status.DONE),
        ({}, None, 1, 1, Status.DONE),  # a signal after the last request
        ({}, 0.9, 0, 1, Status.DONE),
        ({}, 0.99, 0, 1, Status.SLO_MISSED),
        ({"slo_attainment": None}, 0.9, 0, 1, Status.DONE),
        ({"valid": False}, None, 0, 1, Status.INVALID),
        ({"valid": False}, 0.99, 0, 1, Status.INVALID),
        ({"completed": 0, "valid": False}, None, 0, 1, Status.NOTHING_SUCCEEDED),
        ({"num_prompts": 0, "completed": 0, "valid": False}, None, 0, 1, Status.INVALID),  # all in warm-up
        ({"is_complete": False, "valid": False}, None, 0, 1, Status.INCOMPLETE),
        ({"is_complete": False, "valid": False, "completed": 0}, None, 1, 1, Status.INTERRUPTED),
        ({}, None, 0, 2, Status.INCOMPLETE),
        ({}, None, 1, 2, Status.INTERRUPTED),
    ],
)
def test_what_a_result_is_worth(
    changes: dict[str, Any], strict_share: float | None, num_stops: int, num_wanted: int, status: Status
) -> None:
    assert exit_status([{**GOOD, **changes}], switch(num_stops), num_wanted, strict_share) is status


def test_a_sweep_misses_its_slos_where_no_rate_meets_them() -> None:
    both = [{**GOOD, "slo_attainment": share} for share in (0.95, 0.2)]
    assert exit_status(both, switch(), 2, 0.9) is Status.DONE
    assert exit_status(both[1:], switch(), 1, 0.9) is Status.SLO_MISSED
    assert exit_status([GOOD, {**GOOD, "valid": False}], switch(), 2) is Status.INVALID


def search(*shares: tuple[float, bool], max_probes: int = 20, **changes: Any) -> dict[str, Any]:
    """A search of one seed with these (attainment, valid) outcomes, the last of which goes on."""
    settings = SearchSettings(
        start_rate=1.0,
        min_rate=0.5,
        max_rate=4.0,
        seeds=(0,),
        targets=(0.9,),
        tolerance=0.5,
        max_probes=max_probes,
    )
    made = GoodputSearch(settings)
    for number in range(100):
        if (probe := made.next()) is None:
            break
        share, valid = shares[min(number, len(shares) - 1)]
        made.report(probe, ProbeOutcome(attainment=share, num_offered=10, valid=valid))
    return {**to_dict(made), "is_complete": True, "runs": [{"num_prompts": 1, "completed": 1}], **changes}


@pytest.mark.parametrize(
    ("found", "is_strict", "num_stops", "status"),
    [
        (search((1.0, True), (0.0, True), (1.0, True)), False, 0, Status.DONE),
        (search((1.0, True), (0.0, True), (1.0, True)), True, 0, Status.DONE),
        (search((1.0, False), (1.0, True), (0.0, True), (1.0, True)), True, 0, Status.DONE),  # repeated: fine
        (search((1.0, True)), False, 0, Status.INCOMPLETE),  # even --max-rate passed
        (search((1.0, True), max_probes=1), False, 0, Status.INCOMPLETE),
        (search((1.0, True), (0.0, True), (1.0, True), is_complete=False), False, 0, Status.INCOMPLETE),
        (search((1.0, True), is_complete=False), False, 1, Status.INTERRUPTED),
        (search((1.0, True), (0.0, False), (0.0, False), (1.0, True)), False, 0, Status.INVALID),
        (search((0.0, True)), False, 0, Status.DONE),  # no rate does: an answer
        (search((0.0, True)), True, 0, Status.SLO_MISSED),
        (search((0.0, True), runs=[{"num_prompts": 1, "completed": 0}]), True, 0, Status.NOTHING_SUCCEEDED),
    ],
)
def test_what_a_search_is_worth(
    found: dict[str, Any], is_strict: bool, num_stops: int, status: Status
) -> None:
    assert search_status(found, switch(num_stops), is_strict) is status


def test_every_status_has_a_meaning_that_the_help_tells() -> None:
    assert list(MEANINGS) == list(Status)
    for status, meaning in MEANINGS.items():
        assert f"{status.value} {meaning}" in EXIT_HELP
