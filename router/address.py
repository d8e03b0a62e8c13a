"""An HTTP server's address: bound before anything else starts, so that "in use" is one clear sentence."""

from __future__ import annotations

import errno
import socket
from typing import Final

from cluster.errors import ConfigError

BACKLOG: Final = 2048
STALLED_MS: Final = 120_000  # how long the kernel keeps what a client does not take, of answers that are over


def bind(host: str, port: int, flag: str = "--port", *, is_shared: bool = False) -> socket.socket:
    """A listening address of our own, or one that others share, where nobody listens yet: each connection is
    given to one of those who do; those of one that ends go to the others. Port 0 takes a free one.

    Raises:
        ConfigError: the address is in use, not ours, or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is given, and accepted sockets inherit it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit this one too
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise cannot_listen(host, port, error, flag) from error
    if not is_shared:
        listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def cannot_listen(host: str, port: int, error: OSError | OverflowError, flag: str = "--port") -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        reason = f"it is in use by another process; choose another with `{flag}`"
    return ConfigError(f"cannot listen on {host} port {port}: {reason}")
