"""`baton bench` against a real cluster with the real model: exact lengths, and a server that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.load.cli import app
from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.processes import ROOT

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(prefill=1, decode=1) as running:
        yield running


def bench(cluster: LocalCluster, out: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["run", "--url", cluster.url, "--out", str(out), *arguments])
    assert result.exit_code in (0, 3), (result.output, result.exception)  # 3: a busy machine's client is late
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.parametrize(
    "arguments",
    [
        ("--input-tokens", "uniform:20-60"),
        ("--prompt", "text", "--input-tokens", "40"),
        ("--endpoint", "chat", "--input-tokens", "60"),
        ("--prefix-groups", "2", "--prefix-tokens", "48", "--input-tokens", "16"),
    ],
    ids=["ids", "text", "chat", "shared prefixes"],
)
def test_lengths_are_exact(cluster: LocalCluster, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = bench(
        *(cluster, tmp_path / "result.json", "--rate", "8", "--requests", "8", "--output-tokens", "5"),
        *("--slo", "ttft=60s,tpot=10s", *arguments),
    )
    assert result["completed"] == 8
    assert result["total_output_tokens"] == 8 * 5
    assert result["slo_attainment"] == 1.0
    assert not any("length" in reason for reason in result["invalid_reasons"])
    if "--prefix-groups" in arguments:
        assert result["total_cached_tokens"] > 0


def test_a_chat_finds_its_history_cached(cluster: LocalCluster, tmp_path: Path) -> None:
    result = bench(
        *(cluster, tmp_path / "chat.json", "--turns", "3", "--closed-loop", "2", "--requests", "2"),
        *("--input-tokens", "40", "--output-tokens", "20"),
    )
    assert result["completed"] == 6
    assert result["total_cached_tokens"] > 0


def test_a_server_that_dies_leaves_every_request_accounted_for(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "dead.json"
    arguments = [
        *("--rate", "5", "--requests", "40", "--input-tokens", "20", "--output-tokens", "30"),
        *("--out", str(out)),
    ]
    cluster.wait_for(lambda: cluster.worker("decode-0").get("running", 1) == 0, 60.0, "the end of what was")
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "bench", "run", "--url", cluster.url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        text=True,
    )
    try:
        cluster.wait_for(lambda: cluster.worker("decode-0").get("running", 0) > 0, 60.0, "a running request")
        cluster.kill("router-0")
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        cluster.restart("router-0")  # the others find a server, whatever their order
        cluster.wait_ready()
    assert process.returncode in (3, 4), output  # invalid; 4: killed before the first had succeeded
    result = json.loads(out.read_text())
    assert any("nothing listens" in reason for reason in result["invalid_reasons"])
    assert result["num_prompts"] == 40 == result["completed"] + result["failed"]
    assert result["failures"]["connection"] > 0
    assert len((tmp_path / "dead.requests.jsonl").read_text().splitlines()) == 40
