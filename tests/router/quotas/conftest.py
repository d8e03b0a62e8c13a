"""A gateway with keys and a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from cluster.clock import ManualClock
from router.limits import GatewayLimits
from router.quotas.limits import KeyLimits
from tests.support.gateway import RunningGateway, running_gateway, until_quotas_are_quiet
from tests.support.scripted_cluster import Script

LINES = {
    "sk-few": "name=few requests-per-min=3",
    "sk-few-next": "name=few requests-per-min=3",
    "sk-tokens": "name=tokens tokens-per-min=600",
    "sk-slots": "name=slots concurrent=2 share=4",
    "sk-all": "name=all requests-per-min=100 tokens-per-min=1000 concurrent=50",
    "sk-free": "requests-per-min=none",
    "sk-default": "",
}


@pytest.fixture(scope="session")
def quota_gateway(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"sha256:{sha256(key.encode()).hexdigest()} {rest}" for key, rest in LINES.items()]
    path.write_text("\n".join(lines))
    limits = GatewayLimits(api_keys_file=str(path), key_limits=KeyLimits(requests_per_min=7))
    with running_gateway(tokenizer_dir, limits=limits, clock=ManualClock()) as running:
        yield running


@pytest.fixture
def limited(quota_gateway: RunningGateway) -> Iterator[RunningGateway]:
    """Every limit is whole again; nothing may be held at the end."""
    cluster = quota_gateway.cluster
    cluster.script, cluster.refuse = Script(), None
    cluster.streams.clear()
    clock = quota_gateway.app.state.quotas._clock
    quota_gateway.loop.call_soon_threadsafe(clock.advance, 3600.0)
    yield quota_gateway
    until_quotas_are_quiet(quota_gateway)
