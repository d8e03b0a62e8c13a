"""What a command's exit status says: one of the table `MEANINGS`, which `--help` prints.

1. A command that measured (`run`, `sweep`, `max-goodput`) ends with what its results are worth
   (`exit_status`, `search_status`). 0 is kept for what is complete and valid, so that a script need not read
   the result.
2. `--strict` adds a verdict on the server: its SLOs were missed.
3. `compare` ends with whether there was anything to judge, `report` and `mock` with 0.
4. What ends a command before it measured is an error (1), or a command line that cannot work (2: a
   `ConfigError`, `cli_entry`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from bench.load.client.interrupts import EXIT_INTERRUPTED, StopSwitch
from bench.load.goodput.doubts import invalid_ends, out_of_reach, unanswered


class Status(IntEnum):
    DONE = 0
    ERROR = 1
    USAGE = 2
    INVALID = 3
    NOTHING_SUCCEEDED = 4
    INCOMPLETE = 5
    SLO_MISSED = 6
    NOT_JUDGED = 7
    INTERRUPTED = EXIT_INTERRUPTED


MEANINGS: Mapping[Status, str] = {
    Status.DONE: "complete and valid (report: written; compare: judged; mock: ended by a signal)",
    Status.ERROR: "the world refused: a server, a model it does not serve, or a file that cannot be read or "
    "written or is not what it should be",
    Status.USAGE: "the command line cannot work as typed, wherever it is typed",
    Status.INVALID: "measured, but INVALID: the figures do not describe the server, the result says why",
    Status.NOTHING_SUCCEEDED: "measured, and no request succeeded",
    Status.INCOMPLETE: "not all that was asked for: the server went away before the last rate or probe, a "
    "client process died, or a search ended (--max-probes, --max-rate) without an answer to every target",
    Status.SLO_MISSED: "with --strict: complete and valid, but too few requests met the SLOs at any rate",
    Status.NOT_JUDGED: "compare: nothing could be judged (all invalid, or of different plans)",
    Status.INTERRUPTED: "interrupted; what was measured is written",
}
_TABLE = "; ".join(f"{status.value} {text}" for status, text in MEANINGS.items())
EXIT_HELP = f"Exit status: {_TABLE}. Of several that hold, the first of 130, 5, 4, 3, 6."


def exit_status(
    results: Sequence[Mapping[str, Any]],
    stop: StopSwitch,
    num_wanted: int = 1,
    strict_share: float | None = None,
) -> Status:
    """What these results are worth together. A signal after the last request cost nothing.

    Args:
        num_wanted: how many were asked for.
        strict_share: of all offered requests, for which the SLOs must have been met in one of the results.
    """
    is_complete = len(results) == num_wanted and all(result["is_complete"] for result in results)
    if stop.num_stops and not is_complete:
        return Status.INTERRUPTED
    if not is_complete:
        return Status.INCOMPLETE
    if _none_succeeded(results):
        return Status.NOTHING_SUCCEEDED
    if not all(result["valid"] for result in results):
        return Status.INVALID
    shares = [result["slo_attainment"] for result in results if result["slo_attainment"] is not None]
    is_missed = strict_share is not None and bool(shares) and max(shares) < strict_share
    return Status.SLO_MISSED if is_missed else Status.DONE


def search_status(found: Mapping[str, Any], stop: StopSwitch, is_strict: bool) -> Status:
    """A search is worth what it found: single invalid probes are part of it, and repeated."""
    if stop.num_stops and not found["is_complete"]:
        return Status.INTERRUPTED
    if not found["is_complete"] or unanswered(found):
        return Status.INCOMPLETE
    if _none_succeeded(found["runs"]):
        return Status.NOTHING_SUCCEEDED
    if invalid_ends(found):
        return Status.INVALID
    return Status.SLO_MISSED if is_strict and out_of_reach(found) else Status.DONE


def _none_succeeded(results: Sequence[Mapping[str, Any]]) -> bool:
    """Of those that were to be measured: where the warm-up left none, nothing is known of the server."""
    return any(one["num_prompts"] for one in results) and not any(one["completed"] for one in results)
