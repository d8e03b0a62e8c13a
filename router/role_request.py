"""`POST /cluster/roles`: a person asks for a worker in another role.

Answered where metrics are, to callers on this machine, since nothing there asks for a key; and taken as JSON
alone, so that no page of another origin can ask.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from cluster.errors import InvalidRequest, NotAllowed
from cluster.wire.messages import Role

MAX_SHIFT_BYTES: Final = 4096
ROLES_FIXED: Final = (
    "Roles are fixed here: they change under `baton serve --roles planned`, at its first router."
)


class ShiftRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: str
    role: Role


def read_shift(body: bytes) -> ShiftRequest:
    """
    Raises:
        InvalidRequest: naming the field that is wrong.
    """
    try:
        return msgspec.json.decode(body, type=ShiftRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"Not a wish for a role: {error}.") from error


def require_loopback(client: Sequence[Any] | None) -> None:
    """`client`: (host, port) of the connection, as ASGI has it.

    Raises:
        NotAllowed: it comes from another machine.
    """
    host = "" if client is None else str(client[0])
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise NotAllowed("Roles are changed from the machine that the router runs on: ask 127.0.0.1 there.")
