"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`, a status, and
honest `Retry-After` headers.

1. A handler raises; `public_error` turns any exception into a `PublicError`, the only thing clients see.
2. `RequestError`s and the overload family speak in their own words: their messages are written for people.
   Everything else (a lost worker, a bug, a library's exception) is told in a fixed sentence with the request
   id; what really happened goes to the server log under that id. No path, pid or class name gets out.
3. Before the first byte it becomes an HTTP status (`error_headers`, `error_body`); in a stream, an SSE event.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import orjson

from cluster.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RateLimited,
    RequestError,
    ServingError,
    WorkerLost,
)
from router.asgi import JSON_TYPE, HeaderList

logger = logging.getLogger(__name__)

DEFAULT_RETRY_AFTER_S = 1.0  # where nothing better is known


@dataclass(frozen=True, slots=True)
class PublicError:
    """What a client may know of a failure."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


_HTTP_CODES = {
    401: "invalid_api_key",
    403: "host_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}
_HTTP_TYPES = {401: "authentication_error", 404: "not_found_error"}
_REFUSED_FOR_NOW = frozenset({"overloaded", "not_ready", "deadline_exceeded", "rate_limit_exceeded"})


def http_error(status: int, message: str) -> PublicError:
    """A failure of HTTP itself: no such route, wrong method, body too large."""
    kind = _HTTP_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return PublicError(status, message, kind, code=_HTTP_CODES.get(status))


def public_error(error: BaseException, request_id: str) -> PublicError:
    """The client's view of `error`; logs what the client may not see."""
    if isinstance(error, RateLimited):
        return PublicError(
            error.status,
            error.message,
            error.error_type,
            code=error.code,
            retry_after_s=error.retry_after_s,
            headers=error.headers,
        )
    if isinstance(error, RequestError):
        return PublicError(error.status, error.message, error.error_type, error.param, error.code)
    if isinstance(error, Overloaded | NotReady | DeadlineExceeded):
        retry_after_s = error.retry_after_s
        if retry_after_s is None and not isinstance(error, DeadlineExceeded):
            retry_after_s = DEFAULT_RETRY_AFTER_S
        return PublicError(
            error.status, error.message, error.error_type, code=error.code, retry_after_s=retry_after_s
        )
    if isinstance(error, WorkerLost):
        logger.warning("request %s lost its worker: %s", request_id, error)
        message = (
            f"The worker that held the request was lost and no other could go on (request {request_id})."
        )
        return PublicError(
            error.status, message, error.error_type, code=error.code, retry_after_s=error.retry_after_s
        )
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"The server failed to process the request; details are in its log under {request_id}."
    return PublicError(ServingError.status, message, ServingError.error_type, code=ServingError.code)


def error_body(error: PublicError) -> bytes:
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: PublicError) -> HeaderList:
    """Content type, and when to come back if that is known: whole seconds for HTTP, milliseconds for SDKs.
    Gateways before this one read why a request was refused."""
    headers: HeaderList = [JSON_TYPE, *error.headers]
    if error.code in _REFUSED_FOR_NOW:
        headers.append((b"x-baton-dropped-reason", error.code.encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        seconds = max(0.0, error.retry_after_s)
        headers.append((b"retry-after", str(max(1, math.ceil(seconds))).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(seconds * 1000)).encode()))
    return headers
