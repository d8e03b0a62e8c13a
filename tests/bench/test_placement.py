"""The placement benchmark runs, on a small cluster: what it says is about decisions that were made."""

from __future__ import annotations

import json
from pathlib import Path

from bench.placement import main, measure


def test_it_decides_over_the_index_it_built(tmp_path: Path) -> None:
    result = measure(num_workers=12, num_blocks=3_000, num_decisions=200, seed=1)
    assert 2_500 < result["indexed_blocks"] < 30_000  # prompts on their way are in it too
    assert sum(result["placed"].values()) == 200
    assert result["placed"]["remote"] > 0
    assert result["times"]["decide"]["num"] == 200
    assert set(result["times"]) == {"decide", "claim", "release", "heartbeat", "report"}
    out = tmp_path / "placement.json"
    arguments = ["--workers", "4", "--blocks", "600", "--decisions", "20", "--out", str(out)]
    assert main([*arguments, "--limit-us", "1e9"]) == 0
    assert main([*arguments, "--limit-us", "0"]) == 1
    assert json.loads(out.read_text())["decisions"] == 20
