"""What a chaos run showed: one row per kind of fault, then the streams."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from bench.chaos.faults import Fault, Kind
from bench.chaos.run import ChaosOutcome


def detection_s(outcome: ChaosOutcome, fault: Fault) -> float | None:
    """From the signal to the router giving that epoch of the worker up; None if it did not have to."""
    times = [
        gone.at - fault.at
        for gone in outcome.gone
        if (gone.worker, gone.epoch) == (fault.worker, fault.epoch) and gone.at >= fault.at - 0.01
    ]
    return max(0.0, min(times)) if times else None


def overheads_s(outcome: ChaosOutcome) -> list[float]:
    """Of each resumed request: what it took beside recomputing its KV and waiting for that."""
    return [max(0.0, one.gap_s - one.prefill_s - one.queue_s) for one in outcome.resumed]


def to_json(outcome: ChaosOutcome) -> dict[str, Any]:
    """The figures, and every fault with its detection time."""
    return {
        "streams": outcome.num_streams,
        "complete": outcome.num_complete,
        "equal": outcome.num_equal,
        "moved": outcome.num_moved,
        "quiet": outcome.is_quiet,
        "duration_s": round(outcome.duration_s, 1),
        "rolling_restart_s": None if outcome.rolling_s is None else round(outcome.rolling_s, 1),
        "stale_messages_dropped": outcome.stale_messages,
        "detection_s": {kind.value: _spread(_detections(outcome, kind)) for kind in Kind},
        "resumed_s": _spread([one.gap_s for one in outcome.resumed]),
        "resumed_beside_recompute_s": _spread(overheads_s(outcome)),
        "faults": [
            {
                "kind": fault.kind.value,
                "worker": fault.worker,
                "epoch": fault.epoch,
                "detected_s": _rounded(detection_s(outcome, fault)),
                "requests_moved": _num_moved(outcome, fault),
            }
            for fault in outcome.faults
        ],
        "wrong": [
            {"body": body, "answer": dataclasses.asdict(answer), "expected": dataclasses.asdict(expected)}
            for body, answer, expected in outcome.wrong[:5]
        ],
    }


def to_table(outcome: ChaosOutcome) -> str:
    """For people, in Markdown."""
    lines = ["| fault | sent | detected, median / worst | requests moved |", "|---|---|---|---|"]
    for kind in Kind:
        faults = [fault for fault in outcome.faults if fault.kind is kind]
        moved = sum(_num_moved(outcome, fault) for fault in faults)
        lines.append(f"| {kind.value} | {len(faults)} | {_text(_detections(outcome, kind))} | {moved} |")
    percent = 100 / max(1, outcome.num_streams)
    lines += [
        "",
        f"{outcome.num_streams} streams in {outcome.duration_s:.0f} s: "
        f"{outcome.num_complete * percent:.1f} % complete, {outcome.num_equal * percent:.1f} % equal to the "
        f"undisturbed run, {outcome.num_moved} took more than one attempt.",
        f"Next token after a loss, median / worst: {_text([one.gap_s for one in outcome.resumed])}; "
        f"beside recompute and its queue: {_text(overheads_s(outcome))}.",
        f"Stale messages dropped by the router: {outcome.stale_messages}. "
        f"Afterwards {'nothing is left on any worker' if outcome.is_quiet else 'SOMETHING IS LEFT'}.",
    ]
    if outcome.rolling_s is not None:
        lines.append(f"Rolling restart of all workers under the same load: {outcome.rolling_s:.0f} s.")
    return "\n".join(lines)


def _detections(outcome: ChaosOutcome, kind: Kind) -> list[float]:
    times = (detection_s(outcome, fault) for fault in outcome.faults if fault.kind is kind)
    return [time_s for time_s in times if time_s is not None]


def _num_moved(outcome: ChaosOutcome, fault: Fault) -> int:
    """Requests that lost an attempt with this worker between the fault and the next one on it."""
    later = [other.at for other in outcome.faults if other.worker == fault.worker and other.at > fault.at]
    end = min(later, default=float("inf"))
    return sum(fault.worker == one.worker and fault.at - 0.01 <= one.at < end for one in outcome.moved)


def _spread(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    return {
        "count": len(values),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def _text(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} / {max(values):.3f} s" if values else "-"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
