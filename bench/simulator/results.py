"""Result files of the simulator: JSON for programs and, beside it, the same as text."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

from bench.load.results.files import json_safe, write_atomically
from bench.machine import cpu_facts
from bench.simulator.simulation import Report
from bench.simulator.table import Totals, render

MAX_KEPT = 100  # violations


def header(command: str, wall_s: float, num_jobs: int) -> dict[str, Any]:
    """What every result says of its making. `command` makes the same again, on any machine."""
    cpu, _ = cpu_facts()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {
            "cpu": cpu,
            "num_cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        "processes": num_jobs,
        "wall_s": round(wall_s, 1),
    }


def of_runs(totals: Totals) -> dict[str, Any]:
    """Faults injected × outcomes, and what else happened."""
    return {
        "runs": totals.num_runs,
        "requests": totals.num_requests,
        "events": totals.num_events,
        "virtual_s": round(totals.virtual_s, 1),
        "faults_injected": sum(totals.faults.values()),
        "violations": len(totals.failures),
        "outcomes": {name: count for name, count in totals.outcomes.items() if count},
        "faults": {kind: _fault(totals, kind) for kind in sorted(totals.faults)},
        "on_the_way": dict(sorted(totals.counters.items())),
        "violated": [_violated(report) for report in totals.failures[:MAX_KEPT]],
    }


def text_of_runs(content: dict[str, Any], totals: Totals) -> str:
    """The table, and a line on how it came about."""
    return "\n".join(
        [
            f"$ {content['command']}",
            "",
            render(totals),
            "",
            f"{totals.num_runs:,} runs, {totals.num_requests:,} requests, {totals.num_events:,} events, "
            f"{sum(totals.faults.values()):,} faults, {len(totals.failures)} violations.",
            made(content),
        ]
    )


def made(content: dict[str, Any]) -> str:
    """How long it took, and where."""
    machine = content["machine"]
    return (
        f"{content['wall_s']:,.0f} s, {content['processes']} processes, {machine['num_cores']} cores of "
        f"{machine['cpu']}, Python {machine['python']}, {content['date']}."
    )


def write(path: Path, content: dict[str, Any], text: str) -> None:
    """JSON at `path`, the text beside it with the ending `.txt`.

    Raises:
        ConfigError: it cannot be written there.
    """
    write_atomically(path, [json.dumps(json_safe(content), indent=1).encode(), b"\n"])
    write_atomically(path.with_suffix(".txt"), [text.encode(), b"\n"])


def _fault(totals: Totals, kind: str) -> dict[str, Any]:
    hit: dict[str, int] = totals.touched.get(kind, Counter())
    return {
        "times": totals.faults[kind],
        "requests_hit": sum(hit.values()),
        "outcomes": {outcome: count for outcome, count in hit.items() if count},
    }


def _violated(report: Report) -> dict[str, Any]:
    return {"run": report.label, "seed": report.seed, "violation": report.violation}
