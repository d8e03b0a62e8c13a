"""Of two deadlines the sooner one counts, if there are any."""

import pytest

from cluster.clock import soonest


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (2.0, 1.0, 1.0), (0.0, 1.0, 0.0)],
)
def test_the_sooner_deadline(one: float | None, other: float | None, found: float | None) -> None:
    assert soonest(one, other) == found
