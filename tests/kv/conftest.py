"""Fixtures of the edge tests; see `edge_harness`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from cluster.kv.edge import EdgeConfig, EdgeName
from cluster.kv.edges import EdgeKind
from cluster.wire.messages import KVGeometry
from tests.kv.edge_harness import (
    CONFIG,
    GEOMETRY,
    EdgePair,
    EdgePairs,
    PeerProcess,
    StartPeer,
    edge_name,
)
from tests.kv.stand_ins import use_one_way

# The kinds between GPUs need two processes: a driver opens no handle of its own process, and NCCL takes no
# two ranks of one process on one GPU. How NCCL is used, but for its memory, is `one_way`: the same classes.
KINDS = ["local", "shm", "gloo", "one_way"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EdgeKind:
    if request.param == "one_way":
        use_one_way(monkeypatch.setattr)
        return EdgeKind.GLOO
    return EdgeKind(request.param)


@pytest.fixture
async def edge_pairs() -> AsyncIterator[EdgePairs]:
    """Builds pairs that are ready, and closes them."""
    pairs: list[EdgePair] = []

    async def build(
        kind: EdgeKind,
        geometry: KVGeometry = GEOMETRY,
        config: EdgeConfig = CONFIG,
        name: EdgeName | None = None,
    ) -> EdgePair:
        pair = EdgePair(kind, geometry, config, name or edge_name())
        pairs.append(pair)
        await pair.ready()
        return pair

    yield build
    for pair in pairs:
        await pair.close()


@pytest.fixture(scope="session")
def peer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("peers") / "socket"
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("edge_peer.py")), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.stdin.close()
        process.wait(10)


@pytest.fixture
async def start_peer(peer_server: Path) -> AsyncIterator[StartPeer]:
    peers: list[PeerProcess] = []

    async def start() -> PeerProcess:
        reader, writer = await asyncio.open_unix_connection(str(peer_server))
        peer = PeerProcess(reader, writer, json.loads(await reader.readline())["pid"])
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        peer.end()
    await asyncio.sleep(0)  # let aborted transports close


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
