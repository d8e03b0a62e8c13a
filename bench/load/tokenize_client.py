"""Asks a server how many tokens it makes of a text: `/tokenize` in the shape that vLLM gave it.

`{"model", "prompt"}` or `{"model", "messages"}` → `{"count", "tokens", …}`. The count includes what the
server adds itself (a BOS, the chat template), so it is what `usage.prompt_tokens` will say.
"""

from __future__ import annotations

import http.client
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import msgspec

from cluster.errors import BatonError

Messages = list[dict[str, str]]


class TokenizeError(BatonError):
    """The server could not count tokens; the message says why and what to do."""


class TokenizeClient(Protocol):
    """Counts tokens as the server under test does.

    Raises (both):
        TokenizeError: there is no answer that can be used.
    """

    def count_text(self, text: str) -> int: ...

    def count_messages(self, messages: Messages) -> int: ...


class HttpTokenizeClient:
    """One keep-alive connection to the server at `url`; not for use by several threads at once."""

    def __init__(self, url: str, model: str, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError("it has no http scheme, or no host")
        except ValueError as error:
            raise TokenizeError(
                f"`{url}` is not the URL of a server: {error}; use a form such as http://127.0.0.1:8000."
            ) from None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=timeout_s)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._model = model
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def count_text(self, text: str) -> int:
        return self._count({"model": self._model, "prompt": text})

    def count_messages(self, messages: Messages) -> int:
        return self._count({"model": self._model, "messages": messages})

    def _count(self, request: dict[str, Any]) -> int:
        body = msgspec.json.encode(request)
        try:
            status, answer = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = str(error) or type(error).__name__
            raise TokenizeError(
                f"{self._url} did not answer: {reason}; is the server running there?"
            ) from error
        shown = answer[:200].decode("utf-8", "replace")
        if status in (404, 405, 501):
            raise TokenizeError(
                f"{self._url} answered {status}: this server counts no tokens for a model "
                f"`{self._model}`; check the model, or offer token ids on the completions endpoint, which "
                "need no counting."
            )
        if status != 200:
            raise TokenizeError(f"{self._url} answered {status}: {shown}")
        try:
            return msgspec.json.decode(answer, type=_Answer).count
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise TokenizeError(f"{self._url} answered without a `count` of tokens: {shown}") from None

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """One try more on a kept connection that the server closed meanwhile."""
        is_kept = self._connection.sock is not None
        try:
            return self._exchange(body)
        except (ConnectionError, http.client.HTTPException):
            if not is_kept:
                raise
            self._connection.close()
            return self._exchange(body)

    def _exchange(self, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()


class _Answer(msgspec.Struct):
    count: int
