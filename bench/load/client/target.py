"""The server under test: its address, and what it says about itself before the first request.

1. `parse_target` reads a URL: `http://host:port`, with or without a base path and a trailing `/v1`.
2. `probe` asks `/v1/models`, then `/version`; a wrong URL, a refused connection, a wrong key or a server
   that serves another model is one clear sentence before anything is offered.
3. `Target.head` is what every request of a run begins with.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import urllib.parse
from typing import Any, NamedTuple

import msgspec
import orjson

from bench.load.client.replies import body_error, checked
from bench.load.client.tls import PLAIN_HINT, tls_context, tls_reason
from cluster.errors import BatonError, ConfigError, ProtocolError

PROBE_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 16 << 20
READ_BYTES = 1 << 16
ENDPOINTS = ("/completions", "/models")
EXAMPLE = "write it like http://127.0.0.1:8000"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    is_tls: bool = False
    base_path: str = ""  # without a trailing slash and without `/v1`
    api_key: str | None = None
    verify_tls: bool = True

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.base_path}"

    @property
    def headers(self) -> dict[str, str]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = {
            "host": f"{host}:{self.port}",
            "user-agent": "baton-bench",
            "content-type": "application/json",
            "accept-encoding": "identity",  # moments of compressed events would be the compressor's
        }
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    def head(self, endpoint: str) -> bytes:
        """Request line and headers of a POST, up to the value of content-length."""
        lines = [f"POST {self.base_path}{endpoint} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join([*lines, "content-length: "])).encode()


class Reply(NamedTuple):
    status: int
    body: bytes
    location: str | None  # where a redirect leads


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    models: tuple[str, ...]
    version: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None  # of the model's card; "baton" is our own server


def parse_target(url: str, api_key: str | None = None, verify_tls: bool = True) -> Target:
    """
    Raises:
        ConfigError: not an http or https URL, or one with parts that have no meaning here.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"`{url}` is no server URL ({error}); {EXAMPLE}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"`{url}` is no server URL; {EXAMPLE}")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"`{url}`: a server URL has no query, fragment or user name; a key goes into the environment "
            "variable that --api-key-env names"
        )
    if not (url.isprintable() and parts.path.isascii()) or " " in url:
        raise ConfigError(
            f"`{url}`: the path has characters that a URL cannot carry; write it as "
            f"`{urllib.parse.quote(parts.path, safe='/%')}`"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key has characters that an HTTP header cannot carry")
    is_tls = parts.scheme == "https"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError(
            f"`{url}`: give a port from 1 to 65535, or leave it out for {443 if is_tls else 80}"
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    if path.endswith(ENDPOINTS):
        raise ConfigError(
            f"`{url}` is the address of one endpoint: give the server's alone, "
            f"`{url[: -len(parts.path)]}{_before_endpoint(path)}`"
        )
    return Target(
        host=_host_name(parts.hostname),
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        base_path=path,
        api_key=api_key,
        verify_tls=verify_tls,
    )


def _before_endpoint(path: str) -> str:
    """`/base` of `/base/v1/chat/completions`."""
    return path.rpartition("/")[0].removesuffix("/chat").removesuffix("/v1")


def _host_name(name: str) -> str:
    """As the name system and the `host` header have it."""
    try:
        return name.encode("idna").decode()
    except UnicodeError:
        raise ConfigError(
            f"`{name}` is no host name: its parts between dots have 1 to 63 letters, digits or hyphens"
        ) from None


def probe(target: Target, model: str | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> ServerInfo:
    """What the server says about itself; `model` None: the first one it lists.

    Raises:
        BatonError: the server cannot be reached, answers with something that is not a list of models, or does
            not serve `model`.
    """
    reply = _ask(target, "GET", "/v1/models", None, timeout_s)
    if reply.status != 200:
        raise BatonError(f"`{target.url}/v1/models` answered HTTP {reply.status}: {_refusal(reply, target)}")
    try:
        cards: dict[str, dict[str, Any]] = {
            checked(card["id"], str, "id"): card for card in orjson.loads(reply.body)["data"]
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, ProtocolError):
        raise BatonError(
            f"`{target.url}/v1/models` does not list models: is this an OpenAI-compatible server?"
        ) from None
    if not cards:
        raise BatonError(f"`{target.url}` serves no model")
    if model is not None and model not in cards:
        raise BatonError(f"`{target.url}` does not serve `{model}`; it serves: {', '.join(cards)}")
    chosen = model if model is not None else next(iter(cards))
    max_model_len, owned_by = cards[chosen].get("max_model_len"), cards[chosen].get("owned_by")
    return ServerInfo(
        model=chosen,
        models=tuple(cards),
        version=_version(target, timeout_s),
        max_model_len=max_model_len if type(max_model_len) is int and max_model_len > 1 else None,
        owned_by=owned_by if isinstance(owned_by, str) else None,
    )


def _refusal(reply: Reply, target: Target) -> str:
    if reply.location is not None:
        return f"redirected to `{reply.location}`: give the address that answers itself"
    why = body_error(reply.body)
    if reply.status in (401, 403):
        key = "the key given is not the right one" if target.api_key else "no key was given"
        return f"{why}; {key}: it comes from the environment variable that --api-key-env names"
    return why


def why_gone(target: Target, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Why the server does not answer any more; None: it does, with whatever status."""
    try:
        call(target, "GET", "/v1/models", timeout_s=timeout_s)
    except BatonError as error:
        return str(error).rstrip(".?")  # a clause of somebody's sentence
    return None


def call(
    target: Target,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> tuple[int, bytes]:
    """One plain request: (status, body). For questions around a run, not for measured requests.

    Raises:
        BatonError: no connection, or no HTTP answer within `timeout_s`.
    """
    reply = _ask(target, method, path, body, timeout_s)
    return reply.status, reply.body


def _ask(target: Target, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Reply:
    """As `call`. A body that only trickles in ends at `timeout_s`, too."""
    deadline_s = time.monotonic() + timeout_s
    connection = _connection(target, timeout_s)
    payload = None if body is None else orjson.dumps(body)
    try:
        connection.request(method, target.base_path + path, body=payload, headers=target.headers)
        response = connection.getresponse()
        return Reply(response.status, _read(response, deadline_s), response.getheader("location"))
    except ConnectionRefusedError:
        raise BatonError(
            f"nothing listens at `{target.url}`: is the server up, and the port right?"
        ) from None
    except socket.gaierror:
        raise BatonError(f"the host name `{target.host}` is not known") from None
    except TimeoutError:
        raise BatonError(f"`{target.url}{path}` did not answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise BatonError(f"no TLS connection to `{target.url}`: {tls_reason(error)}") from None
    except http.client.HTTPException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = PLAIN_HINT if target.is_tls else "; if it speaks TLS, write https://"
        raise BatonError(f"`{target.url}` does not speak HTTP: {reason}{hint}") from None
    except OSError as error:
        hint = PLAIN_HINT if target.is_tls else ""
        raise BatonError(f"cannot reach `{target.url}`: {error.strerror or error}{hint}") from None
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, deadline_s: float) -> bytes:
    """At most `MAX_REPLY_BYTES` of the body."""
    body = bytearray()
    while len(body) < MAX_REPLY_BYTES and (part := response.read1(READ_BYTES)):
        body += part
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return bytes(body)


def _connection(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    if not target.is_tls:
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    return http.client.HTTPSConnection(
        target.host, target.port, timeout=timeout_s, context=tls_context(target.verify_tls)
    )


def _version(target: Target, timeout_s: float) -> str | None:
    """`/version` is a habit, not a rule: a server without it, or that stumbles over it, has no version."""
    try:
        status, body = call(target, "GET", "/version", timeout_s=timeout_s)
    except BatonError:
        return None
    if status != 200:
        return None
    try:
        version = orjson.loads(body)["version"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return str(version)
