"""Where a stream listens: `unix:/path` or `tcp:host:port`, as a value."""

from __future__ import annotations

import socket
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


def own_host_towards(address: str) -> str:
    """This machine's address on the way to `address`: where a process there can reach us. No packet is sent.

    Raises:
        ConfigError: the host is not known here, or there is no way to it.
    """
    target = parse_address(address)
    if isinstance(target, UnixAddress):
        return "127.0.0.1"
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            target.host, target.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(name)
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"no way to {address}: {error.strerror or error}") from error
    return host
