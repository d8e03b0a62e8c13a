"""Where requests that belong together went last: what placement goes by while no prefix of theirs is known.

1. A request that names a session is placed: `note` keeps its workers, under its tenant and that name.
2. The next one of the session asks `of`. Among workers that are equally good otherwise, those are taken; a
   known prefix says more, so it goes first (`router.elastic`).

The latest `most` sessions are kept. Pure, without a clock.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from cluster.ids import WorkerId

MAX_SESSIONS = 10_000


class Near(msgspec.Struct, frozen=True, gc=False):
    """Workers of the session's last request."""

    prefill: WorkerId
    decode: WorkerId


class Affinity:
    """Owns what is known of sessions."""

    def __init__(self, most: int = MAX_SESSIONS) -> None:
        self._most = most
        self._sessions: OrderedDict[tuple[str, str], Near] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, tenant: str, session: str) -> Near | None:
        return self._sessions.get((tenant, session)) if session else None

    def note(self, tenant: str, session: str, near: Near) -> None:
        """A request of the session was placed. Without a session: nothing."""
        if not session:
            return
        self._sessions[tenant, session] = near
        self._sessions.move_to_end((tenant, session))
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)
