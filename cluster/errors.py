"""Every error Baton raises on purpose.

::

    BatonError
    ├── ConfigError            a flag, environment variable or file value that cannot work
    ├── ModelError             the model directory or file is missing, broken or not supported
    ├── RequestError           the client's fault; HTTP 4xx
    │   ├── InvalidRequest       400, names the field
    │   ├── ContextLengthExceeded 400, both numbers
    │   ├── ModelNotFound        404
    │   └── RateLimited          429, with Retry-After
    ├── ServingError           ours; HTTP 5xx
    │   ├── Overloaded           503 with Retry-After
    │   ├── NotReady             503, names the phase
    │   ├── WorkerLost           502, the worker that held the request died and no other could go on
    │   ├── DeadlineExceeded     504
    │   └── InternalError        500
    ├── WireError              the peer sent something we refuse to read
    │   ├── AuthenticationError
    │   └── ProtocolError        unknown tag, field or version; oversized frame; garbage
    ├── StepError              a step could not be computed: its requests fail, the worker goes on
    ├── DeviceLost             the device computes no more for this process: the worker ends
    └── EdgeError              a KV transfer failed; the attempt fails closed
        ├── EdgeUnfit            this kind of edge cannot join these two workers; another kind may
        ├── EdgeCrowded          this worker holds as many edges of this kind as it may
        └── EdgeDeviceLost       as `DeviceLost`, found by an edge: the worker ends
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What a library says, without the paragraphs it explains it in."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


class BatonError(Exception):
    """Base of all deliberate errors; `str(error)` is one sentence fit to show to a person."""


class ConfigError(BatonError):
    """A setting cannot work; the message names it and says what would."""


class ModelError(BatonError):
    """The model cannot be loaded; the message names the path and the reason."""


class RequestError(BatonError):
    """The request cannot be served as asked. `param` is the JSON field at fault, when there is one."""

    status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, out of range or not supported."""


class NotAllowed(RequestError):
    """Who asks may not have this done."""

    status = 403


class ContextLengthExceeded(RequestError):
    """Prompt plus requested output does not fit; the message gives both numbers."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    error_type = "not_found_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class RateLimited(RequestError):
    """The request's API key has used up what it may. `retry_after_s` None: it will never be served so;
    `headers`: where its limits stand, for the response."""

    status = 429
    error_type = "rate_limit_error"

    def __init__(
        self, message: str, *, retry_after_s: float | None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s
        self.headers = headers


class ServingError(BatonError):
    """The cluster failed a valid request."""

    status = 500
    error_type = "server_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Overloaded(ServingError):
    """No capacity for this request within its deadline."""

    status = 503
    error_type = "overloaded_error"
    code = "overloaded"


class NotReady(ServingError):
    """The cluster cannot serve yet (or any more)."""

    status = 503
    error_type = "overloaded_error"
    code = "not_ready"


class WorkerLost(ServingError):
    """A worker died under the request and nothing could take it over."""

    status = 502
    code = "worker_lost"


class DeadlineExceeded(ServingError):
    """The request's own deadline passed."""

    status = 504
    code = "deadline_exceeded"


class InternalError(ServingError):
    """A fault of ours; details are in the server log under the request id."""


class WireError(BatonError):
    """A peer's bytes were refused; the stream is closed."""


class AuthenticationError(WireError):
    """The peer does not know the cluster token."""


class ProtocolError(WireError):
    """Unknown tag, field or version, an oversized frame, or bytes that are not MessagePack."""


class EdgeError(BatonError):
    """A KV edge broke or refused; no token may be computed from what it carried."""


class EdgeUnfit(EdgeError):
    """A KV edge of this kind cannot join these two workers, whatever is tried again; another kind may."""


class EdgeCrowded(EdgeError):
    """This worker holds as many edges of this kind as it may; one that is closed makes room."""


class EdgeDeviceLost(EdgeError):
    """An edge found that the device cannot be used by this process any more; another process can."""


class StepError(BatonError):
    """A step could not be computed, for a reason that the next one need not have."""


class DeviceLost(BatonError):
    """The device cannot be used by this process any more; another process can."""
