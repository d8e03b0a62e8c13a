import socket
from typing import Any

import pytest

from cluster.errors import ConfigError
from cluster.wire.address import own_host_towards


def test_own_host_towards_a_loopback_router_is_loopback() -> None:
    assert own_host_towards("tcp:127.0.0.1:4000") == "127.0.0.1"
    assert own_host_towards("unix:/tmp/router.sock") == "127.0.0.1"


def test_own_host_towards_an_unknown_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"no way to tcp:host\.invalid:4000"):
        own_host_towards("tcp:host.invalid:4000")
