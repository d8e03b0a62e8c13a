"""What a live cluster shows to others: nothing beyond loopback, no secret and no prompt in any log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.processes import LOOPBACK, listening_addresses
from tests.support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(240)]

PROMPT = "zanzibar-marker-prompt-4711"
STOP = "qqzz-marker-stop"
SALT = "marker-salt-0815"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=["shm", "gloo"])
def cluster(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """At the most talkative level, once with each edge: gloo has listeners of its own."""
    settings: dict[str, Any] = {"prefill_kv_bytes": 8 << 20, "decode_kv_bytes": 8 << 20, "block_size": 16}
    with local_cluster(tiny, kv_edge=request.param, log_level="debug", **settings) as running:
        yield running


def test_everything_binds_to_loopback(cluster: LocalCluster) -> None:
    served = cluster.complete(prompt="hello there " * 10, max_tokens=4, timings=True)["timings"]
    assert served["prefill_worker"] == "prefill-0", "KV must have moved, so that every listener exists"
    pids = {role.pid for role in cluster.processes.roles.values()}
    addresses = listening_addresses(pids)
    assert addresses, "the router serves HTTP at least"
    assert addresses <= LOOPBACK


def test_no_prompt_and_no_secret_in_any_log(cluster: LocalCluster) -> None:
    """Served, refused, interrupted: whatever happens to a request, its content stays out of the logs."""
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "cache_salt": SALT}
    with cluster.client() as client:
        assert client.post("/v1/chat/completions", json=chat | {"stop": [STOP]}).status_code == 200
        text = client.post("/v1/chat/completions", json=chat | {"stream": True, "logprobs": True}).text
        assert text.endswith("data: [DONE]\n\n")
        assert client.post("/v1/chat/completions", json=chat | {"max_tokens": 10**6}).status_code == 400
        assert client.post("/v1/chat/completions", json=chat | {PROMPT: 1}).status_code == 200  # ignored
        assert client.post("/v1/chat/completions", json=chat | {"tool_choice": PROMPT}).status_code == 400
        assert client.post("/v1/completions", content=f"{{{PROMPT}").status_code in (400, 415)
        assert client.post("/tokenize", json={"prompt": PROMPT}).status_code == 200
        headers = {"Authorization": f"Bearer {PROMPT}"}
        assert client.post("/v1/chat/completions", json=chat, headers=headers).status_code == 200
        with client.stream(
            "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 500, "stream": True}
        ):
            pass  # leaves at once
        ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    cluster.wait_quiet(10)
    token = cluster.processes["router-0"].spec.config.cluster_token
    secrets = [PROMPT, STOP, SALT, token, ", ".join(map(str, ids[4:10]))]
    logs = cluster.processes.logs()
    assert "DEBUG" in "".join(logs.values()) or " D " in "".join(logs.values()), "the level is not debug"
    for name, content in logs.items():
        for secret in secrets:
            assert secret not in content, f"{name} tells {secret[:12]}..."
