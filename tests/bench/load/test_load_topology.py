"""What a result says of the server it measured."""

from __future__ import annotations

import socket

import msgspec
import pytest

from bench.load.client.target import ServerInfo, Target
from bench.load.client.topology import config_hash, parse_topology, read_topology
from bench.load.mock.process import running_mock

SERVER = ServerInfo(model="a", models=("a",), version="1", max_model_len=4096, owned_by="baton")


def test_workers_are_counted_by_role() -> None:
    body = b'{"workers":[{"role":"prefill","state":"up"},{"role":"decode"},{"role":"prefill"}],"state":"up"}'
    assert parse_topology(body) == {"decode": 1, "prefill": 2}
    assert parse_topology(b'{"workers":[]}') == {}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"workers":5}', b'{"workers":[1]}', b'{"workers":[{}]}']
)
def test_what_is_no_list_of_workers_says_nothing(body: bytes) -> None:
    assert parse_topology(body) is None


def test_a_server_without_that_page_or_without_a_life_says_nothing() -> None:
    with running_mock() as mock:
        assert read_topology(mock.target) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert read_topology(Target(host="127.0.0.1", port=port)) is None


def test_the_hash_is_of_what_the_server_says() -> None:
    known = config_hash(SERVER, {"decode": 1, "prefill": 1})
    assert known == config_hash(msgspec.structs.replace(SERVER), {"prefill": 1, "decode": 1})
    others = [
        config_hash(SERVER, {"decode": 2, "prefill": 1}),
        config_hash(SERVER, None),
        config_hash(msgspec.structs.replace(SERVER, version="2"), {"decode": 1, "prefill": 1}),
        config_hash(msgspec.structs.replace(SERVER, max_model_len=None), {"decode": 1, "prefill": 1}),
    ]
    assert len({known, *others}) == 1 + len(others)
