"""Where metrics, cluster state and the page's live view can be asked for, beside the API.

On loopback the HTTP server answers everything on its one port. One that listens to a network serves the API
and the chat page there; what is for those who run the cluster moves to an address of its own, on loopback
unless said otherwise. So it does where clients need keys, which operators and their scrapers should not, and
where several routers share the port of the API: each has an admin port, from this one on.
"""

from __future__ import annotations

import ipaddress

from cluster.config import ClusterConfig

MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Other names than `localhost` count as open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def admin_address(config: ClusterConfig) -> tuple[str, int] | None:
    """(host, port) of the first router, or None where the HTTP server answers for it.

    The port is `admin_port`, else the one after the HTTP server's (before it, if that was the last); 0 means
    any free one.
    """
    if config.admin_port is not None:
        return config.admin_host, config.admin_port
    if is_loopback(config.host) and config.routers == 1 and config.api_keys_file is None:
        return None
    if config.port == 0:
        return config.admin_host, 0
    after, before = config.port + 1, config.port - config.routers
    return config.admin_host, after if config.port + config.routers <= MAX_PORT else before


def shown_admin_port(config: ClusterConfig) -> str:
    """What becomes of `admin_port` in words of a person: one port, one per router, or none of its own."""
    admin = admin_address(config)
    if admin is None:
        return "none: the HTTP server's port answers"
    first, last = admin[1], admin[1] + config.routers - 1
    if first == 0:
        return "any free one"
    return str(first) if first == last else f"{first} to {last}, one per router"
