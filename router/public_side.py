"""What a listener that is open to a network does not answer: metrics, cluster state, the live view.

The server marks by which of two listeners a request came in (`on_its_side`); this middleware refuses the
private paths to those by the public one. The same application serves both sides.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from router.asgi import Receive, Scope, Send, send_bytes
from router.openai_errors import error_body, error_headers, http_error
from router.page import FEED_PATHS

SHIFT_PATH = "/cluster/roles"
PRIVATE_PATHS = frozenset({"/metrics", "/cluster", SHIFT_PATH, *FEED_PATHS})
_SIDE = "baton.side"  # key of the scope, where there are two listeners


class Side(Enum):
    PUBLIC = "public"
    ADMIN = "admin"


def on_its_side(scope: Scope, admin_port: int) -> Scope:
    """Mark by which listener it came in."""
    server = scope.get("server")
    side = Side.ADMIN if server is not None and server[1] == admin_port else Side.PUBLIC
    return {**scope, _SIDE: side}


def side_of(scope: Scope) -> Side | None:
    """None where one listener answers everything."""
    side: Side | None = scope.get(_SIDE)
    return side


class PrivateRoutes:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if side_of(scope) is Side.PUBLIC and scope.get("path") in PRIVATE_PATHS:
            error = http_error(404, f"`{scope['path']}` is answered at the admin address only.")
            await send_bytes(send, error.status, error_headers(error), error_body(error))
            return
        await self._app(scope, receive, send)
