"""The goodput tables: what is searched, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.simulator import tables
from bench.simulator.fleet.scenarios import Row

ROW = Row("small", "h100-llama3-8b:2", "azure", "ttft=0.5s,tpot=25ms")
KNOWN = {
    "colocated": {"policy": "colocated:512:srf", "rate": 4.0, "per_seed": [4.0]},
    "static": {"policy": "static:1p1d:srf", "rate": 5.0, "per_seed": [5.0]},
}


@pytest.mark.parametrize(("known", "searched"), [({}, 3), ({"small": KNOWN}, 1), ({"other": KNOWN}, 3)])
def test_known_fixed_policies_are_kept(
    known: dict[str, dict[str, Any]], searched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,10\n")
    asked: list[str] = []

    def search(setup: Any, policy: Any, seeds: Any, start: Any) -> dict[str, Any]:
        asked.append(policy.text)
        return {"policy": policy.text, "rate": 6.0, "per_seed": [6.0]}

    monkeypatch.setattr(tables, "_searched", search)
    monkeypatch.setattr(tables, "find_best", lambda setup, policies, seed: (policies[0], 1.0))
    result = tables.measure(ROW, trace, trace, 1, known)
    assert len(asked) == searched
    assert "elastic" in asked
    if searched == 1:
        assert (result["static"], result["over_best"]) == (KNOWN["static"], 6.0 / 5.0)
