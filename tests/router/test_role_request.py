"""Who may ask for another role, and how."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidRequest, NotAllowed
from cluster.wire.messages import Role
from router.role_request import ShiftRequest, read_shift, require_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1"])
def test_callers_on_this_machine_may(host: str) -> None:
    require_loopback((host, 4000))


@pytest.mark.parametrize("client", [("10.0.0.7", 1), ("::ffff:10.0.0.7", 1), ("proxy", 1), ("", 1), None])
def test_others_may_not(client: tuple[str, int] | None) -> None:
    with pytest.raises(NotAllowed, match=r"127\.0\.0\.1") as told:
        require_loopback(client)
    assert told.value.status == 403


def test_a_wish_names_a_worker_and_a_role() -> None:
    assert read_shift(b'{"worker": "worker-1", "role": "prefill"}') == ShiftRequest("worker-1", Role.PREFILL)
    for body in (b"", b"[]", b'{"worker": "a"}', b'{"worker": "a", "role": "prefill", "when": "now"}'):
        with pytest.raises(InvalidRequest, match="wish for a role"):
            read_shift(body)
