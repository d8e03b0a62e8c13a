"""Where a stream listens: `unix:/path` or `tcp:host:port`, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.errors import ConfigError

MAX_UNIX_PATH_BYTES: Final = 107  # sockaddr_un holds 108 with the closing zero


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int  # 0: any free port, when listening

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """
    Raises:
        ConfigError: neither form, a port out of range, or a path longer than the system allows.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        if len(rest.encode()) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"socket path of {len(rest.encode())} bytes is longer than {MAX_UNIX_PATH_BYTES}, "
                f"choose a shorter runtime directory: {rest}"
            )
        return UnixAddress(rest)
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isascii() and port.isdigit() and int(port) <= 65535:
            return TcpAddress(host, int(port))
    raise ConfigError(f"not an address, expected `unix:/path` or `tcp:host:port`: {text}")
