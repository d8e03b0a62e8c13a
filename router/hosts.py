"""A request that names another host than this server in its `Host` is refused (`cluster.allowed_hosts`).

One without `Host` is no browser's. What says whether the process lives is answered whoever asks: probes come
by all sorts of names, and there is nothing to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.allowed_hosts import HostNames
from router.api_keys import OPEN_PATHS
from router.asgi import Receive, Scope, Send, send_bytes
from router.openai_errors import error_body, error_headers, http_error
from router.public_side import Side, side_of


@dataclass(frozen=True, slots=True)
class SideHosts:
    """Of the two listeners; None: any. Where one answers everything, it is the public one."""

    public: HostNames | None = None
    admin: HostNames | None = None


class HostCheck:
    """ASGI middleware."""

    def __init__(self, app: Any, hosts: SideHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            hosts = self._hosts.admin if side_of(scope) is Side.ADMIN else self._hosts.public
            foreign = None if hosts is None else _foreign(scope, hosts)
            if foreign is not None:
                error = http_error(
                    403,
                    f"This server is not asked by the name `{foreign}`, only as localhost or by address: if "
                    "the name is its own, its operator can say so with `--allowed-hosts`.",
                )
                await send_bytes(send, error.status, error_headers(error), error_body(error))
                return
        await self._app(scope, receive, send)


def _foreign(scope: Scope, hosts: HostNames) -> str | None:
    """The first host that is not one of these."""
    sent = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
    return next((host[:100] for host in sent if not hosts.admits(host)), None)
