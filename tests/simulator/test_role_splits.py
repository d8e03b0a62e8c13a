"""The split that the planner would choose is about the best there is, when all are simulated."""

from __future__ import annotations

from bench.load.plans.trace_formats import TraceRow
from bench.simulator.role_splits import compare


def test_the_chosen_split_serves_about_as_much_as_the_best() -> None:
    rows = [TraceRow(float(at), 400 + 37 * (at % 50), 40 + 13 * (at % 30)) for at in range(400)]
    lines = list(compare(rows, "h100-llama3-8b:2", "ttft=0.3s,tpot=10ms", length_s=10.0))
    assert [[roles.num_prefill for roles in line.split] for line in lines] == [[0], [1]], (
        "none without decode"
    )
    (chosen,) = (line for line in lines if line.is_chosen)
    assert chosen.simulated >= 0.95 * max(line.simulated for line in lines)
    assert max(lines, key=lambda line: line.predicted) is chosen
