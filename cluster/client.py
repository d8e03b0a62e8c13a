"""A small client of Baton's HTTP interface, for `baton status` and `baton chat`. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Final

from cluster.admin_address import is_loopback
from cluster.errors import BatonError

TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 300.0  # between two events of a stream


class ClientError(BatonError):
    """The server cannot be reached, refused the request, or broke off; the message says which. `status` is
    that of an answer that was an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def get_json(url: str, path: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    """
    Raises:
        ClientError: no server, no answer in time, an error status, or no JSON.
    """
    request = _request(url, path, headers=_key_header(api_key))
    with _open(request, timeout_s) as response:
        try:
            return _parse(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"the answer broke off: {error}") from error


def stream_chat(
    url: str, body: dict[str, Any], api_key: str | None = None
) -> Generator[dict[str, Any], None, None]:
    """The chunks of a chat completion as they come. Closing the generator ends the answer.

    Raises:
        ClientError: as `get_json`, or the stream carried an error or ended early.
    """
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **_key_header(api_key)}
    data = json.dumps(body | {"stream": True}).encode()
    request = _request(url, "/v1/chat/completions", headers, data)
    with closing(_events(request)) as events:
        for event in events:
            if event == b"[DONE]":
                return
            chunk = _parse(event)
            if "error" in chunk:
                raise ClientError(chunk["error"]["message"])
            yield chunk
    raise ClientError("the answer broke off: the server closed the connection")


def stream_pictures(url: str) -> Iterator[dict[str, Any]]:
    """What the page's stream tells of the cluster: everything first, then what changed; until it stops.

    Raises:
        ClientError: as `get_json`, or the connection broke.
    """
    for event in _events(_request(url, "/page/events", {})):
        yield _parse(event)


def _events(request: urllib.request.Request) -> Generator[bytes, None, None]:
    """The data of each server-sent event; ours have one line each."""
    with _open(request, ANSWER_TIMEOUT_S) as response:
        try:
            for line in response:
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"the answer broke off: {error}") from error


def _request(
    url: str, path: str, headers: dict[str, str], data: bytes | None = None
) -> urllib.request.Request:
    """
    Raises:
        ClientError: the URL is none of a server.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_address = False
    if not (is_address and url.isascii() and url.isprintable()) or " " in url:
        raise ClientError(f"--url {url!r} is no server's address: write it like http://127.0.0.1:8000")
    return urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)


def _key_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        return _opener(request.host).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise ClientError(_error_message(error), error.code) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        why = (reason.strerror if isinstance(reason, OSError) else None) or reason
        raise ClientError(
            f"no server at {request.type}://{request.host}: {why}; start one with `baton serve`"
        ) from error


def _opener(address: str) -> urllib.request.OpenerDirector:
    """Through the proxies that the environment names, but for this machine: no proxy reaches its loopback."""
    host = urllib.parse.urlsplit(f"//{address}").hostname or ""
    is_here = is_loopback(host)
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _error_message(error: urllib.error.HTTPError) -> str:
    """The server's own sentence where its body has one."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}"


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ClientError(f"the server's answer is not JSON: {data[:80]!r}") from error
