"""Two live clusters of one tiny model: the oracle (one engine, nothing handed over) and the pair to test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.tiny_model import write_tiny_model

BLOCK = 16
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "prefill_kv_bytes": 8 << 20, "decode_kv_bytes": 8 << 20}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Iterator[LocalCluster]:
    """Decode workers prefill for themselves. Ask each question with a salt of its own: nothing is cached."""
    with local_cluster(tiny, prefill=0, **SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def pair(tiny: Path) -> Iterator[LocalCluster]:
    """One prefill and one decode worker; prompts are cut into chunks that are no whole blocks."""
    with local_cluster(tiny, prefill_chunk=BLOCK + BLOCK // 2, recovery_wait_s=60.0, **SETTINGS) as running:
        yield running


@pytest.fixture(autouse=True)
def _quiet_after(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a case does, nothing of it is left on any worker."""
    yield
    if "pair" in request.fixturenames:
        cluster: LocalCluster = request.getfixturevalue("pair")
        cluster.wait_quiet(20)
