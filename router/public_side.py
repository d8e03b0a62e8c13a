"""What a listener that is open to a network does not answer: metrics, cluster state, the live view.

The server marks requests that came in by such a listener (`on_public_side`); this middleware refuses the
private paths to them. The same application serves both sides.
"""

from __future__ import annotations

from typing import Any

from router.asgi import Receive, Scope, Send, send_bytes
from router.openai_errors import error_body, error_headers, http_error
from router.page import FEED_PATHS

PRIVATE_PATHS = frozenset({"/metrics", "/cluster", *FEED_PATHS})
_PUBLIC = "baton.public_side"  # key of the scope


def on_public_side(scope: Scope, admin_port: int) -> Scope:
    """Mark what did not come in by the admin port."""
    server = scope.get("server")
    return scope if server is not None and server[1] == admin_port else {**scope, _PUBLIC: True}


class PrivateRoutes:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _PUBLIC in scope and scope.get("path") in PRIVATE_PATHS:
            error = http_error(404, f"`{scope['path']}` is answered at the admin address only.")
            await send_bytes(send, error.status, error_headers(error), error_body(error))
            return
        await self._app(scope, receive, send)
