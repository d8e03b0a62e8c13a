"""What is around every route: each answer has a name and is counted, also that to what no route expected."""

from __future__ import annotations

import re
import uuid
from typing import Any

from cluster.metrics import Metrics
from cluster.request_context import enter_request
from router.asgi import Message, Receive, Scope, Send, header, send_bytes
from router.gateway import REQUEST_ID
from router.openai_errors import error_body, error_headers, public_error
from router.page import PAGE_PATHS

_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_ROUTES = frozenset(
    {
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/ping", "/version", "/metrics", "/cluster", "/openapi.json"),
        *PAGE_PATHS,
    }
)


class Envelope:
    """ASGI middleware around every route: names the request, counts the response."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = header(scope, b"x-request-id")
        request_id = label if label and _CLIENT_ID.fullmatch(label) else f"req-{uuid.uuid4().hex}"
        scope[REQUEST_ID] = request_id
        enter_request(request_id, header(scope, b"traceparent"), header(scope, b"tracestate"))
        name = (b"x-request-id", request_id.encode())

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), name]
                self._metrics.observe_http(_route(scope["path"]), message["status"])
            await send(message)

        await self._app(scope, receive, named_send)


class LastAnswer:
    """ASGI middleware: answers what a route did not expect; those around it name and count the answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if has_started or scope["type"] != "http":
                raise
            public = public_error(error, scope[REQUEST_ID])
            await send_bytes(send, public.status, error_headers(public), error_body(public))


def _route(path: str) -> str:
    """A bounded name for metrics."""
    if path in _ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
