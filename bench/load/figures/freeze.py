"""Times in which the server said nothing to anyone, and answered again later: it froze, and came back. Pure.

1. A silence is a pause between two moments at which something came from the server, to whichever request.
   Only the part of it counts in which a request was in flight.
2. It is a freeze if it lasted longer than a second, than ten of the run's median pauses, and than twice what
   nine in ten of the requests outside it waited for their first byte: slow first tokens and a long queue are
   silent as well, again and again.
3. And somebody suffered: a request ran into its time limit, most of its life in the silence, or three
   waited in it for longer than that. At the run's start only time limits count: first prompts may be slow.
4. Where nobody listened it is an outage, and where the client stood still it is no silence of the server's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load.figures.outage import signs
from bench.load.records import ClientReport, RequestRecord, RunRecord, Status

MIN_SILENCE_S = 1.0
NUM_MEDIAN_PAUSES = 10
NUM_USUAL_WAITS = 2
USUAL_PERCENT = 90
MIN_NUM_WAITING = 3

Array = npt.NDArray[np.float64]


class Freeze(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's start."""

    start_s: float  # the last sign before it; later if no request was in flight then
    end_s: float  # when something came again
    num_in_flight: int  # requests that were in flight at some moment of it
    num_timed_out: int  # of these, in it

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def find_freezes(run: RunRecord) -> list[Freeze]:
    """In order of time. The last sign of a run is followed by none: who froze for good did not come back."""
    flights = [record for record in run.records if record.end_s is not None and _sent_s(record) is not None]
    all_signs = [signs(record) for record in flights]
    heard_s = np.sort(np.array([moment for some in all_signs for moment in some], dtype=np.float64))
    if not len(heard_s):
        return []
    starts_s = np.array([_sent_s(record) for record in flights], dtype=np.float64)
    ends_s = np.array([record.end_s for record in flights], dtype=np.float64)
    first_s = np.array(
        [min(some, default=record.end_s) for some, record in zip(all_signs, flights, strict=True)],
        dtype=np.float64,
    )
    is_timeout = np.array([record.status is Status.TIMEOUT for record in flights], dtype=np.bool_)
    ok_s = max((record.end_s or 0.0 for record in flights if record.status is Status.OK), default=-np.inf)
    refused_s = [record.end_s for record in flights if record.is_unreachable and record.end_s is not None]
    median_s = float(np.median(np.diff(heard_s))) if len(heard_s) > 1 else 0.0
    floor_s = max(MIN_SILENCE_S, NUM_MEDIAN_PAUSES * median_s)
    edges_s = np.concatenate([[min(float(starts_s.min()), float(heard_s[0]))], heard_s])
    found = []
    for i in np.flatnonzero(np.diff(edges_s) > floor_s):
        from_s, to_s = float(edges_s[i]), float(edges_s[i + 1])
        overlap_s = np.minimum(ends_s, to_s) - np.maximum(starts_s, from_s)
        is_in = overlap_s > 0
        elsewhere_s = (first_s - starts_s)[~is_in]
        usual_s = float(np.percentile(elsewhere_s, USUAL_PERCENT)) if len(elsewhere_s) else 0.0
        limit_s = max(floor_s, NUM_USUAL_WAITS * usual_s)
        if not is_in.any() or _covered_s(starts_s[is_in], ends_s[is_in], from_s, to_s) <= limit_s:
            continue
        is_cut = is_in & is_timeout & (ends_s <= to_s) & (2 * overlap_s >= ends_s - starts_s)
        num_waiting = 0 if i == 0 else int((overlap_s > limit_s).sum())
        if not is_cut.any() and num_waiting < MIN_NUM_WAITING:
            continue
        start_s = max(from_s, float(starts_s[is_in].min()))
        is_outage = any(from_s <= moment <= to_s for moment in refused_s)
        if to_s > ok_s or is_outage or _client_stood_still(run.clients, start_s, to_s):
            continue
        found.append(
            Freeze(
                start_s=start_s,
                end_s=to_s,
                num_in_flight=int(is_in.sum()),
                num_timed_out=int(is_cut.sum()),
            )
        )
    return found


def freeze_cautions(run: RunRecord) -> list[str]:
    """One sentence, of the longest of them."""
    freezes = find_freezes(run)
    if not freezes:
        return []
    worst = max(freezes, key=lambda one: one.length_s)
    others = len(freezes) - 1
    more = f"; {others} more such time{'' if others == 1 else 's'} in this run" if others else ""
    were = "1 request was" if worst.num_in_flight == 1 else f"{worst.num_in_flight} requests were"
    return [
        f"The server stood still: nothing came from it for {worst.length_s:.1f} s, from "
        f"{worst.start_s:.1f} s to {worst.end_s:.1f} s, while {were} in flight ({worst.num_timed_out} timed "
        f"out in that time), and then it answered again{more}. The figures count them all."
    ]


def _sent_s(record: RequestRecord) -> float | None:
    return record.started_s if record.sent_s is None else record.sent_s


def _covered_s(starts_s: Array, ends_s: Array, from_s: float, to_s: float) -> float:
    """How much of the time between two moments at least one request was in flight."""
    order = np.argsort(starts_s)
    begins_s = np.maximum(starts_s[order], from_s)
    until_s = np.minimum(np.maximum.accumulate(ends_s[order]), to_s)
    before_s = np.concatenate([[from_s], until_s[:-1]])
    return float(np.maximum(0.0, until_s - np.maximum(begins_s, before_s)).sum())


def _client_stood_still(clients: Sequence[ClientReport], from_s: float, to_s: float) -> bool:
    """A client that read nothing for half of that time cannot say that nothing came."""
    stalls = (stall for client in clients for stall in client.stalls_s)
    return any(2 * (min(end_s, to_s) - max(start_s, from_s)) >= to_s - from_s for start_s, end_s in stalls)
