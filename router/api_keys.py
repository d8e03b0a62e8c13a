"""Who may use the API: keys known by their digests, from a file that may change while the router runs.

1. The file has a line `sha256:<hex>` per key (`printf %s KEY | sha256sum` makes one), empty lines and `#`
   comments. The keys themselves are nowhere on disk.
2. With a file, every path needs `Authorization: Bearer KEY`, also those that do not exist; only the few that
   say whether the process lives are open. Without one, nothing does.
3. A presented key is hashed and compared with every digest, in constant time.
4. The file is looked at again at most once a second. One that cannot be read any more leaves the keys as they
   were, and the log says so.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from cluster.clock import Clock
from cluster.errors import ConfigError
from router.asgi import Receive, Scope, Send, send_bytes
from router.openai_errors import error_body, error_headers, http_error

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_LINE = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LOOK_AGAIN_S = 1.0
_MAX_KEY_BYTES = 4096
_MISSING = "Send an API key as `Authorization: Bearer KEY`."
_UNKNOWN = "The API key is not known here."


def read_digests(path: Path) -> tuple[bytes, ...]:
    """Raises:
    ConfigError: the file cannot be read, has no key, or a line that is no digest.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{path} line {number} is not `sha256:` and 64 hexadecimal digits: write the digest of the "
                "key, as `printf %s KEY | sha256sum` makes it"
            )
        digests.append(bytes.fromhex(match[1]))
    if not digests:
        raise ConfigError(f"{path} has no API key: nobody could use the server")
    return tuple(dict.fromkeys(digests))


class KeyRing:
    """The keys of one file, as they are now."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises:
        ConfigError: see `read_digests`.
        """
        self._path = path
        self._clock = clock
        self._digests = read_digests(path)
        self._stamp = self._read_stamp()
        self._look_at = clock.now() + _LOOK_AGAIN_S

    def knows(self, key: bytes) -> bool:
        """Whether it is one of the keys. Takes as long for one that is as for one that is not."""
        self._look_again()
        presented = sha256(key).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, presented)
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
            self._digests = read_digests(self._path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys from %s", len(self._digests), self._path)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class KeyCheck:
    """ASGI middleware: nothing behind it is reached without a key, but for `OPEN_PATHS`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = presented_key(scope)
            if key is None or not self._keys.knows(key):
                error = http_error(401, _MISSING if key is None else _UNKNOWN)
                await send_bytes(send, error.status, error_headers(error), error_body(error))
                return
        await self._app(scope, receive, send)


def presented_key(scope: Scope) -> bytes | None:
    """The key of a request; None if there is none, more than one, or something else than a bearer's."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and 0 < len(key) <= _MAX_KEY_BYTES else None
