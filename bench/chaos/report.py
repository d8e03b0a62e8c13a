"""What a chaos run showed: the figures (JSON), and of those a table: a row per kind of fault, then streams.

Detection counts from the signal to the router giving that epoch of the worker up. A process that is killed is
not gone at once: the system takes its memory apart first and closes its streams only then. So there is also
when the process had ended, and how long after that the router knew.

A resumed stream counts from its latest loss: what it took beside recomputing its KV and waiting for that.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Final

from bench.chaos.faults import Fault, Gone, Kind, Resumed
from bench.chaos.run import ChaosOutcome

# What is to hold, in seconds: killed and hung workers found, streams resumed beside their recompute.
TARGETS: Final = {"KILL": 0.1, "STOP": 3.0, "resumed_beside_recompute": 1.0}
_CLOCK_S: Final = 0.01  # log lines are rounded


def gave_up(outcome: ChaosOutcome, fault: Fault) -> Gone | None:
    """When and why the router gave that epoch of the worker up; None if it did not have to."""
    events = [
        gone
        for gone in outcome.gone
        if (gone.worker, gone.epoch) == (fault.worker, fault.epoch) and gone.at >= fault.at - _CLOCK_S
    ]
    return min(events, key=lambda gone: gone.at, default=None)


def overhead_s(outcome: ChaosOutcome, one: Resumed) -> float:
    """Of a resumed request, since its latest loss."""
    losses = [
        moved.at for moved in outcome.moved if moved.request == one.request and moved.at <= one.at + _CLOCK_S
    ]
    gap_s = one.at - max(losses) if losses else one.gap_s
    return max(0.0, min(gap_s, one.gap_s) - one.prefill_s - one.queue_s)


def to_json(outcome: ChaosOutcome) -> dict[str, Any]:
    """The figures, and every fault with its detection time."""
    faults = [_fault(outcome, fault) for fault in outcome.faults]
    overheads = [overhead_s(outcome, one) for one in outcome.resumed]
    detected = {kind.value: _of_kind(faults, kind, "detected_s") for kind in Kind}
    return {
        "streams": outcome.num_streams,
        "complete": outcome.num_complete,
        "equal": outcome.num_equal,
        "moved": outcome.num_moved,
        "quiet": outcome.is_quiet,
        "duration_s": round(outcome.duration_s, 1),
        "rolling_restart_s": None if outcome.rolling_s is None else round(outcome.rolling_s, 1),
        "stale_messages_dropped": outcome.stale_messages,
        "sent": {kind.value: sum(fault.kind is kind for fault in outcome.faults) for kind in Kind},
        "requests_moved": {kind.value: sum(_of_kind(faults, kind, "requests_moved")) for kind in Kind},
        "detection_s": {name: _spread(times) for name, times in detected.items()},
        "killed_process_ended_s": _spread(_of_kind(faults, Kind.KILL, "process_ended_s")),
        "detection_after_the_end_s": _spread(_of_kind(faults, Kind.KILL, "detected_after_the_end_s")),
        "resumed_s": _spread([one.gap_s for one in outcome.resumed]),
        "resumed_beside_recompute_s": _spread(overheads),
        "targets_s": TARGETS,
        "within_target": {
            "KILL": _within(detected["KILL"], TARGETS["KILL"]),
            "STOP": _within(detected["STOP"], TARGETS["STOP"]),
            "resumed_beside_recompute": _within(overheads, TARGETS["resumed_beside_recompute"]),
        },
        "faults": faults,
        "wrong": [
            {"body": body, "answer": dataclasses.asdict(answer), "expected": dataclasses.asdict(expected)}
            for body, answer, expected in outcome.wrong[:5]
        ],
    }


def to_table(result: dict[str, Any]) -> str:
    """For people, in Markdown, from what `to_json` says."""
    lines = ["| fault | sent | gone for the router, median / worst | requests moved |", "|---|---|---|---|"]
    for kind, spread in result["detection_s"].items():
        lines.append(
            f"| {kind} | {result['sent'][kind]} | {_text(spread)} | {result['requests_moved'][kind]} |"
        )
    percent = 100 / max(1, result["streams"])
    lines += [
        "",
        f"{result['streams']} streams in {result['duration_s']:.0f} s: "
        f"{result['complete'] * percent:.1f} % complete, {result['equal'] * percent:.1f} % equal to the "
        f"undisturbed run, {result['moved']} took more than one attempt.",
        f"A killed process had ended after {_text(result['killed_process_ended_s'])}; the router knew "
        f"{_text(result['detection_after_the_end_s'])} after that.",
        f"Next token after a loss, median / worst: {_text(result['resumed_s'])}; "
        "beside recompute and its queue, since the latest loss: "
        f"{_text(result['resumed_beside_recompute_s'])}.",
        "Within their targets: "
        + ", ".join(
            f"{name} ({result['targets_s'][name]:g} s) {inside} of {of}"
            for name, (inside, of) in result["within_target"].items()
        )
        + ".",
        f"Stale messages dropped by the router: {result['stale_messages_dropped']}. "
        f"Afterwards {'nothing is left on any worker' if result['quiet'] else 'SOMETHING IS LEFT'}.",
    ]
    if result["rolling_restart_s"] is not None:
        lines.append(
            f"Rolling restart of all workers under the same load: {result['rolling_restart_s']:.0f} s."
        )
    return "\n".join(lines)


def _fault(outcome: ChaosOutcome, fault: Fault) -> dict[str, Any]:
    gone = gave_up(outcome, fault)
    ended_at = outcome.ended.get((fault.worker, fault.epoch))
    detected_s = None if gone is None else max(0.0, gone.at - fault.at)
    ended_s = None if ended_at is None or fault.kind is not Kind.KILL else ended_at - fault.at
    after_s = None if detected_s is None or ended_s is None else max(0.0, detected_s - ended_s)
    return {
        "kind": fault.kind.value,
        "worker": fault.worker,
        "epoch": fault.epoch,
        "detected_s": _rounded(detected_s),
        "process_ended_s": _rounded(ended_s),
        "detected_after_the_end_s": _rounded(after_s),
        "reason": None if gone is None else gone.reason,
        "requests_moved": _num_moved(outcome, fault),
    }


def _of_kind(faults: list[dict[str, Any]], kind: Kind, name: str) -> list[float]:
    return [fault[name] for fault in faults if fault["kind"] == kind.value and fault[name] is not None]


def _num_moved(outcome: ChaosOutcome, fault: Fault) -> int:
    """Requests that lost an attempt with this worker between the fault and the next one on it."""
    later = [other.at for other in outcome.faults if other.worker == fault.worker and other.at > fault.at]
    end = min(later, default=float("inf"))
    return sum(fault.worker == one.worker and fault.at - _CLOCK_S <= one.at < end for one in outcome.moved)


def _within(values: list[float], most: float) -> tuple[int, int]:
    return sum(value <= most for value in values), len(values)


def _spread(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    return {
        "count": len(values),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def _text(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.3f} / {spread['max']:.3f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
