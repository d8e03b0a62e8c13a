"""A page whose name was made to point at this machine gets nothing from a server that asks for no key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.allowed_hosts import HostNames, host_names, parse_hosts
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.preflight import check_allowed_hosts
from cluster.request_config import RequestConfig
from cluster.role_config import RouterConfig
from router.hosts import SideHosts
from router.service import _hosts
from tests.support.gateway import RunningGateway, check_error, running_gateway

EVIL = "evil.example"
OWN = (
    *("localhost", "LOCALHOST:8000", "localhost.", "app.localhost:80", "127.0.0.1", "127.0.0.1:1", "[::1]"),
    *("[::1]:8000", "10.0.0.7:8000", "[fe80::1]", "llm.example", "LLM.example:443", "llm.example."),
)
FOREIGN = (
    *(EVIL, f"{EVIL}:8000", f"localhost.{EVIL}", f"127.0.0.1.{EVIL}", "evillocalhost", "not.llm.example"),
    *("", ":8000", "[::1", "[evil]", f"[::1].{EVIL}", f"localhost@{EVIL}", "localhost:8000:1", "127.1"),
    *(f"localhost, {EVIL}", f"localhost {EVIL}", "localhost..", "\x00", "é"),
)


@pytest.fixture(scope="module")
def checked(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    hosts = SideHosts(host_names("127.0.0.1", "llm.example", asks_for_key=False))
    with running_gateway(tokenizer_dir, hosts=hosts) as running:
        yield running


def ask(gateway: RunningGateway, host: str, path: str = "/v1/models", **headers: str) -> httpx.Response:
    return gateway.client.get(path, headers={"host": host, **headers})


def test_names_of_this_server() -> None:
    names = HostNames(frozenset({"llm.example"}))
    assert [host for host in OWN if not names.admits(host)] == []
    assert [host for host in FOREIGN if names.admits(host)] == []


@pytest.mark.parametrize("host", OWN)
def test_who_names_this_server_is_served(checked: RunningGateway, host: str) -> None:
    assert ask(checked, host).status_code == 200
    body = {"prompt": "Hi", "stream": True}
    assert checked.client.post("/v1/completions", json=body, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/cluster", "/page/picture", "/nowhere"])
def test_who_names_another_is_refused_everywhere(checked: RunningGateway, path: str) -> None:
    origin = f"http://{EVIL}"  # of a browser that takes this server for the page's own
    response = ask(checked, f"{EVIL}:8000", path, origin=origin)
    message = check_error(response, 403, code="host_not_allowed")
    assert EVIL in message
    assert "--allowed-hosts" in message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_nothing_is_generated_for_a_foreign_name(checked: RunningGateway, path: str, method: str) -> None:
    checked.cluster.streams.clear()
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "tokens": [1]}
    response = checked.client.request(method, path, json=body, headers={"host": EVIL})
    check_error(response, 403, code="host_not_allowed")
    assert not checked.cluster.streams


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_are_answered_whatever_they_call_it(checked: RunningGateway, path: str) -> None:
    assert ask(checked, EVIL, path).status_code == 200


def exchange(gateway: RunningGateway, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_one_name_of_several_is_not_enough(checked: RunningGateway) -> None:
    two = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
    assert exchange(checked, two).startswith(b"HTTP/1.1 403 ")
    assert exchange(checked, b"GET /v1/models HTTP/1.1\r\nHost: \xff\xfe\r\n").startswith(b"HTTP/1.1 403 ")
    long = b"GET /v1/models HTTP/1.1\r\nHost: " + b"a" * 5000 + b"\r\n"
    assert len(json.loads(exchange(checked, long).partition(b"\r\n\r\n")[2])["error"]["message"]) < 400


def test_who_sends_no_name_is_no_browser(checked: RunningGateway) -> None:
    assert exchange(checked, b"GET /v1/models HTTP/1.0\r\n").startswith(b"HTTP/1.1 200 ")


# ---- where it is checked --------------------------------------------------------------------------


def config(host: str, admin_host: str = "127.0.0.1", **requests: str) -> RouterConfig:
    return RouterConfig(
        cluster_token="x" * 32,
        served_model_name="m",
        block_size=32,
        router="router-0",  # type: ignore[arg-type]
        model_dir="/m",
        host=host,
        port=1,
        admin_host=admin_host,
        control_address="unix:/a",
        num_prefill=1,
        num_decode=1,
        requests=RequestConfig(**requests),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_on_loopback_without_keys(host: str) -> None:
    for names in (_hosts(config(host)).public, _hosts(config(host)).admin):
        assert names is not None
        assert not names.admits(EVIL)
        assert names.admits(f"[{host}]" if ":" in host else host)
    assert _hosts(config(host, allowed_hosts="")) == _hosts(config(host))


def test_elsewhere_only_where_it_is_asked_for() -> None:
    """Probes and services of Kubernetes come by any name. An admin address asks nobody for a key."""
    opened = _hosts(config("0.0.0.0", "0.0.0.0"))
    assert opened == SideHosts(None, None)
    keyed = _hosts(config("127.0.0.1", api_keys_file="keys"))
    assert keyed.public is None
    assert keyed.admin is not None
    named = _hosts(config("0.0.0.0", "0.0.0.0", allowed_hosts="llm.example, pod-1"))
    for names in (named.public, named.admin):
        assert names is not None
        assert names.admits("pod-1:8000")
        assert names.admits("10.1.2.3:8000")
        assert not names.admits(EVIL)
    assert _hosts(config("127.0.0.1", allowed_hosts="*")) == SideHosts(None, None)


def test_each_listener_has_its_own_names(tokenizer_dir: Path) -> None:
    hosts = SideHosts(None, host_names("127.0.0.1", None, asks_for_key=False))
    with running_gateway(tokenizer_dir, hosts=hosts, admin=True) as gateway:
        assert ask(gateway, EVIL).status_code == 200
        url = f"http://127.0.0.1:{gateway.admin_port}"
        for path in ("/metrics", "/cluster", "/v1/models"):
            assert gateway.client.get(url + path).status_code == 200
            check_error(gateway.client.get(url + path, headers={"host": EVIL}), 403, code="host_not_allowed")


@pytest.mark.parametrize("text", ["http://a", "a/b", "a:80", "*.a", "a b", "-a", "a..b", "é", "."])
def test_what_is_no_host_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-hosts.*is no host"):
        parse_hosts(f"llm.example,{text}")
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        check_allowed_hosts(ClusterConfig(allowed_hosts=text))


def test_hosts_are_read() -> None:
    assert parse_hosts(" LLM.example. ,pod_1,,10.0.0.1,[::1]") == {
        "llm.example",
        "pod_1",
        "10.0.0.1",
        "[::1]",
    }
    check_allowed_hosts(ClusterConfig())
    check_allowed_hosts(ClusterConfig(allowed_hosts="llm.example"))
