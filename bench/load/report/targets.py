"""Which runs of a page belong together: only runs of one workload, model, SLOs and endpoint make a sweep.

1. `tell_apart` gives each run the name of its target. Runs of one name whose work differs become `name #2`.
2. `by_load` orders them, as tables and legends show them.
3. `unlike` says in words what differs, for a caution on the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.load.report.values import ReportRun, in_flight, mapping, number, offered_rate, target_name
from bench.load.results.likeness import differences, in_words, work_of


def work(result: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal for figures of two runs to stand on one line. A trace's pace is its rate."""
    trace = mapping(result, "trace")
    return {
        "workload": work_of(result),
        "trace": {key: trace.get(key) for key in ("format", "sha256")} if trace else None,
        "slos_ms": result.get("slos_ms"),
        "endpoint": result.get("endpoint"),
    }


def tell_apart(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """The runs, each with the name of its target; a model is part of what tells targets of one name apart."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    named = []
    for run in runs:
        base = target_name(run.result)
        kind = {**work(run.result), "model": run.result.get("model_id")}
        known = kinds.setdefault(base, [])
        at = next((i for i, one in enumerate(known) if not differences(one, kind)), len(known))
        if at == len(known):
            known.append(kind)
        named.append(replace(run, name=base if at == 0 else f"{base} #{at + 1}"))
    return named


def by_load(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """Targets in order of first appearance, and the runs of each by load and seed."""
    targets = list(dict.fromkeys(run.target for run in runs))

    def place(run: ReportRun) -> tuple[int, float, float]:
        held = in_flight(run.result)
        load = held if held is not None else offered_rate(run.result) or 0.0
        return targets.index(run.target), load, number(run.result, "arrival", "seed") or 0.0

    return sorted(runs, key=place)


def unlike(runs: Sequence[ReportRun]) -> str | None:
    """How the work of the runs differs from that of the first; None where it is the same."""
    told = [one for run in runs[1:] for one in differences(work(runs[0].result), work(run.result))]
    return in_words(list(dict.fromkeys(told))) if told else None
