"""Which HTTP request the running code works for: what logs name and traces continue.

Set once by the gateway, at the top of a request's task; what the task calls, awaits or sends to a thread
sees it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`label` is the `x-request-id`; the others are the W3C trace headers, as sent."""

    label: str
    traceparent: str | None = None
    tracestate: str | None = None


_current: ContextVar[RequestContext | None] = ContextVar("baton_request", default=None)


def enter_request(label: str, traceparent: str | None = None, tracestate: str | None = None) -> None:
    """Everything this task does from here on belongs to the request."""
    _current.set(RequestContext(label, traceparent, tracestate))


def current_request() -> RequestContext | None:
    return _current.get()
