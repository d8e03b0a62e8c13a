"""Whom a router takes in: what a worker of a name that is here already may be."""

from __future__ import annotations

import pytest

from cluster.ids import Epoch
from cluster.wire.messages import Role
from router.registration import refusal
from tests.router.conductor_peers import BLOCK_SIZE, make_register


@pytest.mark.parametrize(
    ("epoch", "last", "says"), [(1, 2, "stale"), (2, 2, "is a decode worker here, not prefill"), (3, 2, None)]
)
def test_a_role_changes_with_the_epoch_alone(epoch: int, last: int, says: str | None) -> None:
    """The process before may not be known to be gone yet; the epoch says which of the two counts."""
    here = make_register("worker-1", Role.DECODE, last)
    told = refusal(make_register("worker-1", Role.PREFILL, epoch), [here], Epoch(last), BLOCK_SIZE)
    assert (told is None) == (says is None)
    assert says is None or says in str(told)
