"""Requests out of a connection's bytes: just enough HTTP/1.1 for a load test's client. Reads no socket."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024


class BadRequest(Exception):
    """The client's fault; the message is one sentence for it, `status` the HTTP status."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    body: bytes
    keep_alive: bool


def parse_request(buffer: bytearray) -> HttpRequest | None:
    """The first whole request, removed from `buffer`; None: more bytes are needed.

    Raises:
        BadRequest: these bytes can never become a request that is served.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > MAX_HEAD_BYTES:
            raise BadRequest(f"the request's head exceeds {MAX_HEAD_BYTES} bytes", status=413)
        return None
    line, *lines = buffer[:end].decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest("the request line is not HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in lines)}
    if "transfer-encoding" in headers:
        raise BadRequest("a request body must have a content-length", status=501)
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise BadRequest("content-length is not a number")
    num_bytes = int(length)
    if num_bytes > MAX_BODY_BYTES:
        raise BadRequest(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
    start = end + 4
    if len(buffer) < start + num_bytes:
        return None
    body = bytes(buffer[start : start + num_bytes])
    del buffer[: start + num_bytes]
    default = "keep-alive" if parts[2] == "HTTP/1.1" else "close"
    keep_alive = headers.get("connection", default).lower() != "close"
    return HttpRequest(parts[0], parts[1], body, keep_alive)
