"""One gateway for all tests of this folder; each test gets its cluster in the initial state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.delivery import Readiness
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.scripted_cluster import Script, ScriptedCluster


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def shared_gateway(tokenizer_dir: Path) -> Iterator[RunningGateway]:
    with running_gateway(tokenizer_dir) as running:
        yield running


@pytest.fixture
def gateway(shared_gateway: RunningGateway) -> RunningGateway:
    cluster: ScriptedCluster = shared_gateway.cluster
    cluster.script = Script()
    cluster.refuse = None
    cluster.readiness = Readiness(True, "ready")
    cluster.limit = None
    cluster.num_queued = 0
    cluster.workers = ()
    cluster.streams.clear()
    return shared_gateway
