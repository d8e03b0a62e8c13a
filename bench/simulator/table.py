"""What a batch came to, as text: faults × outcomes, and what else happened on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.simulator.simulation import Report
from bench.simulator.verdict import Outcome

_COLUMNS = tuple(outcome.value for outcome in Outcome)


@dataclass(slots=True)
class Totals:
    """Sums over reports; the reports with a violation are kept."""

    num_runs: int = 0
    num_requests: int = 0
    num_events: int = 0
    virtual_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    touched: dict[str, Counter[str]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    failures: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.num_runs += 1
        self.num_requests += sum(report.outcomes.values())
        self.num_events += report.num_events
        self.virtual_s += report.virtual_s
        self.outcomes.update(report.outcomes)
        self.faults.update(report.faults)
        self.counters.update(report.counters)
        for fault, outcomes in report.touched.items():
            self.touched.setdefault(fault, Counter()).update(outcomes)
        if report.violation is not None:
            self.failures.append(report)


def render(totals: Totals) -> str:
    """One row per kind of fault: how often, how many requests it could hit, and how those ended."""
    columns = [column for column in _COLUMNS if totals.outcomes[column]]
    rows = [["fault", "times", "requests hit", *columns]]
    for fault in sorted(totals.faults):
        hit = totals.touched.get(fault, Counter())
        rows.append(
            [
                fault,
                f"{totals.faults[fault]:,}",
                f"{sum(hit.values()):,}",
                *(f"{hit[column]:,}" for column in columns),
            ]
        )
    total = [f"{totals.outcomes[column]:,}" for column in columns]
    rows.append(["all requests", f"{sum(totals.faults.values()):,}", f"{totals.num_requests:,}", *total])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(_cell(row, index, widths) for index in range(len(row))) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    lines.insert(-1, "-" * len(lines[0]))
    happened = ", ".join(f"{count:,} {name}" for name, count in sorted(totals.counters.items()))
    return "\n".join([*lines, "", f"On the way: {happened}."])


def _cell(row: list[str], index: int, widths: list[int]) -> str:
    return row[index].ljust(widths[index]) if index == 0 else row[index].rjust(widths[index])
