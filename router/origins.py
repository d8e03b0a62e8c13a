"""Which web pages may use the API from a browser: cross-origin requests, as browsers ask for them (CORS).

A browser lets a page read an answer of another origin only if the answer says so, and asks first (`OPTIONS`)
before it sends JSON or a key there. Unless the operator names origins, nothing is said, and no page but this
server's own can do anything here. What is for operators (`router.public_side`) is never opened.

The browser's question carries no key, so it is answered before keys are asked for.
"""

from __future__ import annotations

from typing import Any, Final

from cluster.allowed_origins import ANY
from router.asgi import HeaderList, Message, Receive, Scope, Send, header
from router.public_side import PRIVATE_PATHS

_MAX_AGE_S: Final = b"600"
_ASKED_METHOD: Final = b"access-control-request-method"
# Of every answer, also one that says nothing to its origin: a cache must not give it to another.
_VARY: Final = (b"vary", b"origin")
_READABLE: Final = b", ".join(
    (
        *(b"openai-processing-ms", b"retry-after", b"retry-after-ms", b"x-baton-dropped-reason"),
        *(b"x-baton-ignored", b"x-request-id", b"x-should-retry"),
        *(
            b"x-ratelimit-%b-%b" % (what, limit)
            for what in (b"limit", b"remaining", b"reset")
            for limit in (b"requests", b"tokens")
        ),
    )
)


class AllowedOrigins:
    """ASGI middleware."""

    def __init__(self, app: Any, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PRIVATE_PATHS:
            await self._app(scope, receive, send)
            return
        allowing = self._allowing(header(scope, b"origin"))
        is_question = scope["method"] == "OPTIONS" and header(scope, _ASKED_METHOD) is not None
        if allowing and is_question:
            headers = [*allowing, _VARY, *_asked_for(scope)]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        told = [*allowing, (b"access-control-expose-headers", _READABLE)] if allowing else []

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *told, _VARY]
            await send(message)

        await self._app(scope, receive, send_readable)

    def _allowing(self, origin: str | None) -> HeaderList:
        """Empty: nothing is said to this one."""
        if origin is not None and ANY in self._origins:
            return [(b"access-control-allow-origin", b"*")]
        if origin is not None and origin in self._origins:
            return [(b"access-control-allow-origin", origin.encode("latin-1"))]
        return []


def _asked_for(scope: Scope) -> HeaderList:
    """What the browser's question asks for: the headers that it wants to send, and, from a page of the public
    network, to reach this one."""
    headers: HeaderList = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", _MAX_AGE_S),
    ]
    if (wanted := header(scope, b"access-control-request-headers")) is not None:
        headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
    if header(scope, b"access-control-request-private-network") == "true":
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers
