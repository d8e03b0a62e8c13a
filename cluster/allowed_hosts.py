"""By which names a server may be asked: the setting `allowed_hosts`, read, and what follows where it is not
set.

A page that a browser loaded from a name of its author's can have that name point at 127.0.0.1 a moment later
(DNS rebinding): for the browser the server here is then of the page's own origin, and the page may read what
it answers. The name is still in the request's `Host`. Where a server is reached by this machine alone and
asks for no key, it therefore answers to names of this machine only.

Any numeric address will do: nobody can make one point elsewhere. So probes and scrapers that come by address
are never refused.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from cluster.admin_address import is_loopback
from cluster.errors import ConfigError

ANY: Final = "*"
_LOCAL: Final = "localhost"  # and every name below it, which nobody can own
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_HOST: Final = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(:[0-9]*)?")


@dataclass(frozen=True, slots=True)
class HostNames:
    """The names, beside addresses and this machine's own, that one listener may be asked by."""

    names: frozenset[str]

    def admits(self, host: str) -> bool:
        """Whether a `Host` header names this server; its port does not matter."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        if match[1].startswith("["):
            return _is_address(match[1][1:-1])
        name = match[1].removesuffix(".")
        is_local = name == _LOCAL or name.endswith("." + _LOCAL)
        return is_local or name in self.names or _is_address(name)


def host_names(host: str, allowed: str | None, *, asks_for_key: bool) -> HostNames | None:
    """Of a listener that is bound to `host`; None: it answers to any.

    Raises:
        ConfigError: `allowed` names something that is no host.
    """
    names = parse_hosts(allowed or "")
    if ANY in names or (not names and (asks_for_key or not is_loopback(host))):
        return None
    return HostNames(names | {host.lower()})


def parse_hosts(text: str) -> frozenset[str]:
    """`chat.example, llm.internal`, or `*` |-> the names.

    Raises:
        ConfigError: one of them is no name of a host.
    """
    names = frozenset(part.strip().lower().removesuffix(".") for part in text.split(",") if part.strip())
    for name in names - {ANY}:
        if not _NAME.fullmatch(name) and not _is_address(name.strip("[]")):
            raise ConfigError(
                f"`--allowed-hosts`: `{name}` is no host: write names without scheme and port, like "
                f"llm.example; or `{ANY}` for any"
            )
    return names


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
