"""`POST /cluster/roles`: a person asks for a worker in another role.

Answered where metrics are, and taken as JSON alone, so that no page of another origin can ask.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.errors import InvalidRequest
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
