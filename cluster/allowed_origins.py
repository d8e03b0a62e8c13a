"""The setting `allowed_origins`, read: which web pages may use the API from a browser."""

from __future__ import annotations

from typing import Final

from cluster.errors import ConfigError

ANY: Final = "*"


def parse_origins(text: str) -> frozenset[str]:
    """`https://chat.example, http://localhost:3000`, or `*` |-> the origins.

    Raises:
        ConfigError: one of them is no origin.
    """
    origins = frozenset(part.strip() for part in text.split(",") if part.strip())
    for origin in origins - {ANY}:
        scheme, separator, host = origin.partition("://")
        if not (scheme and separator and host) or "/" in host or not origin.isascii() or ANY in host:
            raise ConfigError(
                f"`--allowed-origins`: `{origin}` is no origin: write scheme and host, like "
                f"https://chat.example or http://localhost:3000, without a path; or `{ANY}` for any"
            )
    return origins
