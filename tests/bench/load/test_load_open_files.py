"""Whether a plan fits the limit of open files is known before it is offered."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.client.frames import Job
from bench.load.client.open_files import SPARE_FILES, certain_connections, check_open_files
from cluster.errors import ConfigError

INFINITY = resource.RLIM_INFINITY


def jobs(*scheduled_s: float) -> list[Job]:
    return [Job(index, at_s, b"{}") for index, at_s in enumerate(scheduled_s)]


def test_slots_and_moments_say_how_many_are_in_flight_for_certain() -> None:
    assert certain_connections(jobs(0.0, 0.0, 0.0), num_slots=2) == 2
    assert certain_connections(jobs(0.0, 0.0, 0.0), num_slots=9) == 3  # a slot without a request is none
    assert certain_connections(jobs(0.0, 1.0, 1.0, 2.0), num_slots=None) == 2
    assert certain_connections(jobs(*[0.0] * 500), num_slots=None) == 500  # all at once
    assert certain_connections([], num_slots=None) == 0
    later_turn = Job(1, 0.0, b"{}", session=0, turn=1)
    assert certain_connections([*jobs(0.0), later_turn], num_slots=None) == 1


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(64, 4096))
def test_the_check_allows_exactly_what_fits(connections: list[int], hard: int) -> None:
    if max(connections) + SPARE_FILES <= hard:
        check_open_files(connections, soft_limit=INFINITY, hard_limit=hard)
        return
    with pytest.raises(ConfigError, match=f"hard limit is {hard:,}") as caught:
        check_open_files(connections, soft_limit=INFINITY, hard_limit=hard)
    assert "\n" not in str(caught.value)


def test_the_advice_works() -> None:
    with pytest.raises(ConfigError, match="--processes 6 ") as caught:
        check_open_files([5000], soft_limit=1024, hard_limit=1024)
    assert "5,032 open files" in str(caught.value)
    check_open_files([5000 // 6 + 1] * 6, soft_limit=1024, hard_limit=1024)


def test_the_parent_of_many_processes_counts_too() -> None:
    with pytest.raises(ConfigError, match="in their parent, but its limit is 100"):
        check_open_files([1] * 50, soft_limit=100, hard_limit=1024)


def test_no_limit_is_no_limit() -> None:
    check_open_files([10**7], soft_limit=INFINITY, hard_limit=INFINITY)
