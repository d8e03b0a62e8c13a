"""Who may use the API: keys known by their digests, from a file that may change while the router runs.

1. The file has a line per key, empty lines and `#` comments:

       sha256:<hex>  name=team-a requests-per-min=60 tokens-per-min=100000 concurrent=8 share=2

   The keys themselves are nowhere on disk (`printf %s KEY | sha256sum` makes the digest). What a line does
   not say is as the flags say; `none` is no limit. Keys of one name are one tenant, with one set of limits.
2. With a file, every path needs `Authorization: Bearer KEY`, also those that do not exist; open are the few
   that say whether the process lives, the files of the page, which a browser cannot send a key for, and, at
   the admin address, what only that answers. Without a file, nothing needs a key.
3. A presented key is hashed and compared with every digest, in constant time.
4. The file is looked at again at most once a second. One that cannot be read any more leaves the keys as they
   were, and the log says so.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cluster.clock import Clock
from cluster.errors import ConfigError
from router.asgi import Receive, Scope, Send, send_bytes
from router.openai_errors import error_body, error_headers, http_error
from router.page import page_files
from router.public_side import PRIVATE_PATHS, side_of
from router.quotas.limits import KeyLimits, parse_settings

logger = logging.getLogger(__name__)

API_KEY = "baton.api_key"  # key of the scope: the `ApiKey` that was presented; absent where none is asked for
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LOOK_AGAIN_S = 1.0
_MAX_KEY_BYTES = 4096
_MISSING = "Send an API key as `Authorization: Bearer KEY`."
_UNKNOWN = "The API key is not known here."


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file."""

    digest: bytes
    tenant: str
    limits: KeyLimits


def read_keys(path: Path, defaults: KeyLimits) -> tuple[ApiKey, ...]:
    """
    Raises:
        ConfigError: the file cannot be read, has no key, or a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    keys: dict[bytes, ApiKey] = {}
    tenants: dict[str, KeyLimits] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        written, *settings = text.split()
        match = _DIGEST.fullmatch(written)
        if match is None:
            raise ConfigError(
                f"{path} line {number} does not begin with `sha256:` and 64 hexadecimal digits: write the "
                "digest of the key, as `printf %s KEY | sha256sum` makes it"
            )
        digest = bytes.fromhex(match[1])
        try:
            key = ApiKey(digest, *parse_settings(settings, f"key-{digest.hex()[:12]}", defaults))
        except ConfigError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
        if keys.setdefault(digest, key) != key:
            raise ConfigError(f"{path} line {number}: this key is there already, with other settings")
        if tenants.setdefault(key.tenant, key.limits) != key.limits:
            raise ConfigError(
                f"{path} line {number}: `{key.tenant}` has other limits further up; keys of one name share "
                "their limits, so all of its lines must say the same"
            )
    if not keys:
        raise ConfigError(f"{path} has no API key: nobody could use the server")
    return tuple(keys.values())


class KeyRing:
    """The keys of one file, as they are now."""

    def __init__(self, path: Path, clock: Clock, defaults: KeyLimits | None = None) -> None:
        """`defaults`: limits of keys that have none of their own.

        Raises:
            ConfigError: see `read_keys`.
        """
        self._path = path
        self._clock = clock
        self._defaults = defaults or KeyLimits()
        self._keys = read_keys(path, self._defaults)
        self._stamp = self._read_stamp()
        self._look_at = clock.now() + _LOOK_AGAIN_S

    def find(self, key: bytes) -> ApiKey | None:
        """Which of the keys it is, if any. Takes as long for one that is there as for one that is not."""
        self._look_again()
        presented = sha256(key).digest()
        found = None
        for known in self._keys:
            found = known if hmac.compare_digest(known.digest, presented) else found
        return found

    def _look_again(self) -> None:
        now = self._clock.now()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_AGAIN_S
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path, self._defaults)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys from %s", len(self._keys), self._path)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class KeyCheck:
    """ASGI middleware: nothing behind it is reached without a key, but for what `_is_open`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            presented = presented_key(scope)
            key = None if presented is None else self._keys.find(presented)
            if key is None:
                error = http_error(401, _MISSING if presented is None else _UNKNOWN)
                await send_bytes(send, error.status, error_headers(error), error_body(error))
                return
            scope[API_KEY] = key
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path in PRIVATE_PATHS:
        return side_of(scope) is not None  # at the admin address; the public one has nothing there
    return path in OPEN_PATHS or (scope["method"] in ("GET", "HEAD") and path in page_files())


def presented_key(scope: Scope) -> bytes | None:
    """The key of a request; None if there is none, more than one, or something else than a bearer's."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and 0 < len(key) <= _MAX_KEY_BYTES else None
