"""A small client of Baton's HTTP interface, for `baton status` and `baton chat`. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

from cluster.errors import BatonError

TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 300.0  # between two pieces of an answer


class ClientError(BatonError):
    """The server cannot be reached, refused the request, or broke off; the message says which."""


def get_json(url: str, path: str) -> Any:
    """
    Raises:
        ClientError: no server, an error status, or no JSON.
    """
    with _open(urllib.request.Request(url.rstrip("/") + path), TIMEOUT_S) as response:
        return _parse(response.read())


def stream_chat(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of an answer's text as they come.

    Raises:
        ClientError: as `get_json`, or the stream carried an error or ended early.
    """
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions",
        data=json.dumps(body | {"stream": True}).encode(),
        headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
    )
    with _open(request, ANSWER_TIMEOUT_S) as response:
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = _parse(data)
                if "error" in event:
                    raise ClientError(event["error"]["message"])
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"the answer broke off: {error}") from error
    raise ClientError("the answer broke off: the server closed the connection")


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise ClientError(_error_message(error)) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ClientError(
            f"no server at {request.full_url}: {reason}; start one with `baton serve`"
        ) from error


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
