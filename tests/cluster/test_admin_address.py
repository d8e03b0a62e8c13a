"""Where the cluster is shown: beside the API on loopback, on a port of its own otherwise."""

from __future__ import annotations

import socket

import pytest

from cluster import launch
from cluster.admin_address import admin_address, is_loopback
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.launch_plan import Site, plan_roles
from cluster.role_config import RouterConfig


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.5", False), ("gpu-7.lan", False), ("", False),
    ],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"host": "0.0.0.0"}, ("127.0.0.1", 8001)),
        ({"host": "0.0.0.0", "port": 65535}, ("127.0.0.1", 65534)),
        ({"host": "0.0.0.0", "port": 0}, ("127.0.0.1", 0)),
        ({"host": "0.0.0.0", "admin_host": "10.0.0.5", "admin_port": 9000}, ("10.0.0.5", 9000)),
        ({"admin_port": 9000}, ("127.0.0.1", 9000)),
        ({"api_keys_file": "/keys"}, ("127.0.0.1", 8001)),
        ({"routers": 2}, ("127.0.0.1", 8001)),
        ({"routers": 3, "port": 65533}, ("127.0.0.1", 65530)),
        ({"routers": 2, "admin_host": "10.0.0.5", "admin_port": 9000}, ("10.0.0.5", 9000)),
    ],
)
def test_the_address(settings: dict[str, object], expected: tuple[str, int] | None) -> None:
    config = ClusterConfig(**settings)  # type: ignore[arg-type]
    assert admin_address(config) == expected
    site = Site(served_model_name="m", runtime_dir="/run", log_dir="/log", cluster_token="t", num_cores=2)
    router = plan_roles(config, site)[0].config
    assert isinstance(router, RouterConfig)
    assert router.admin_port == (None if expected is None else expected[1])
    routers = [role.config for role in plan_roles(config, site) if isinstance(role.config, RouterConfig)]
    if expected is not None:
        ports = [router.admin_port for router in routers]
        assert ports == [expected[1] + number for number in range(config.routers)]


def test_a_taken_admin_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.preflight, "check_model", lambda model: "m")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: .*; choose another with --admin-port"):
            launch.check(ClusterConfig(port=0, admin_port=port))


def test_any_free_port_is_settled_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.preflight, "check_model", lambda model: "m")
    checked = launch.check(ClusterConfig(port=0, admin_port=0))
    assert checked.admin_port
    assert checked.admin_port != checked.port
    assert launch.check(ClusterConfig(port=0)).admin_port is None
