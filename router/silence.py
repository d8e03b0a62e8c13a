"""Whether a worker that says nothing is hung: one decision for the live router and the simulator. Pure.

A silent worker gets a second look before it is given up: if the router itself slept, what the worker said
meanwhile is read in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SECOND_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """`look_in_s`: when to look again; None: it is hung."""

    look_in_s: float | None
    is_suspected: bool


def judge(silent_s: float, late_s: float, limit_s: float, is_suspected: bool) -> Verdict:
    """`late_s`: how long after its time this look comes, so how long the router may have slept."""
    if silent_s < limit_s:
        return Verdict(limit_s - silent_s, is_suspected=False)
    if not is_suspected or late_s > SECOND_LOOK_S:
        return Verdict(SECOND_LOOK_S, is_suspected=True)
    return Verdict(None, is_suspected=True)
