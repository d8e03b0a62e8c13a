"""Times in which the server said nothing to anyone, and answered again later: it froze, and came back. Pure.

1. A silence is a pause between two moments at which something came from the server, to whichever request; or
   from the last one to the end of the run, if it answered when it was asked after that. Only the part of it
   counts in which a request was in flight.
2. It is a freeze if it lasted longer than a second, than ten of the run's median pauses, and than twice what
   nine in ten of the requests outside it waited for their first byte: slow first tokens and a long queue are
   silent as well, again and again.
3. And somebody suffered: a request ran into its time limit, most of its life in the silence, or three
   waited in it for longer than that. At the run's start only time limits count: first prompts may be slow.
   At its end, two of these requests have to be sent in the silence: some that get no answer are no freeze.
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
MIN_NUM_SENT_AT_END = 2

Array = npt.NDArray[np.float64]


class Freeze(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's start."""

    start_s: float  # the last sign before it; later if no request was in flight then
    end_s: float  # when something came again, else the end of the run
    is_to_the_end: bool  # it answered again only after the run
    num_in_flight: int  # requests that were in flight at some moment of it
    num_timed_out: int  # of these, in it

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


class _Flights:
    """The sent requests of a run, as columns."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        sent = [one for one in records if one.end_s is not None and _sent_s(one) is not None]
        heard_s = [signs(record) for record in sent]
        pairs = zip(heard_s, sent, strict=True)
        self.starts_s = np.array([_sent_s(record) for record in sent], dtype=np.float64)
        self.ends_s = np.array([record.end_s for record in sent], dtype=np.float64)
        self.first_s = np.array([min(some, default=one.end_s) for some, one in pairs], dtype=np.float64)
        self.is_timeout = np.array([record.status is Status.TIMEOUT for record in sent], dtype=np.bool_)
        self.is_ok = np.array([record.status is Status.OK for record in sent], dtype=np.bool_)
        self.heard_s = np.sort(np.array([moment for some in heard_s for moment in some], dtype=np.float64))

    def freeze(
        self, from_s: float, to_s: float, floor_s: float, *, is_start: bool, is_end: bool
    ) -> Freeze | None:
        """Whether this silence was one; `floor_s` is what it lasted longer than in any case."""
        overlap_s = np.minimum(self.ends_s, to_s) - np.maximum(self.starts_s, from_s)
        is_in = overlap_s > 0
        elsewhere_s = (self.first_s - self.starts_s)[~is_in]
        usual_s = float(np.percentile(elsewhere_s, USUAL_PERCENT)) if len(elsewhere_s) else 0.0
        limit_s = max(floor_s, NUM_USUAL_WAITS * usual_s)
        if not is_in.any() or covered_s(self.starts_s[is_in], self.ends_s[is_in], from_s, to_s) <= limit_s:
            return None
        lives_s = self.ends_s - self.starts_s
        is_cut = is_in & self.is_timeout & (self.ends_s <= to_s) & (2 * overlap_s >= lives_s)
        if is_end:
            has_suffered = int((is_cut & (self.starts_s > from_s)).sum()) >= MIN_NUM_SENT_AT_END
        else:
            num_waiting = 0 if is_start else int((overlap_s > limit_s).sum())
            has_suffered = bool(is_cut.any()) or num_waiting >= MIN_NUM_WAITING
        if not has_suffered:
            return None
        return Freeze(
            start_s=max(from_s, float(self.starts_s[is_in].min())),
            end_s=to_s,
            is_to_the_end=is_end,
            num_in_flight=int(is_in.sum()),
            num_timed_out=int(is_cut.sum()),
        )


def find_freezes(run: RunRecord) -> list[Freeze]:
    """In order of time."""
    flights = _Flights(run.records)
    heard_s = flights.heard_s
    if not len(heard_s) or not flights.is_ok.any():
        return []
    floor_s = MIN_SILENCE_S
    if len(heard_s) > 1:
        floor_s = max(floor_s, NUM_MEDIAN_PAUSES * float(np.median(np.diff(heard_s))))
    # Time limits that were met gave cause to ask after the run (`may_be_gone`).
    came_back = run.is_complete and run.server_gone is None
    last_s = float(flights.ends_s.max()) if came_back else float(heard_s[-1])
    edges_s = np.concatenate([[min(float(flights.starts_s.min()), float(heard_s[0]))], heard_s, [last_s]])
    ok_s = float(flights.ends_s[flights.is_ok].max())
    refused_s = [one.end_s for one in run.records if one.is_unreachable and one.end_s is not None]
    found = []
    for i in np.flatnonzero(np.diff(edges_s) > floor_s):
        from_s, to_s, is_end = float(edges_s[i]), float(edges_s[i + 1]), int(i) == len(heard_s)
        one = flights.freeze(from_s, to_s, floor_s, is_start=int(i) == 0, is_end=is_end)
        if one is None or (to_s > ok_s and not is_end):
            continue
        is_outage = any(from_s <= moment <= to_s for moment in refused_s)
        if not is_outage and not _client_stood_still(run.clients, one.start_s, to_s):
            found.append(one)
    return found


def freeze_cautions(run: RunRecord) -> list[str]:
    """One sentence, of the longest of them."""
    freezes = find_freezes(run)
    if not freezes:
        return []
    worst = max(freezes, key=lambda one: one.length_s)
    others = len(freezes) - 1
    back = "it answered again only when it was asked after the run"
    back = back if worst.is_to_the_end else "then it answered again"
    more = f"; {others} more such time{'' if others == 1 else 's'} in this run" if others else ""
    were = "1 request was" if worst.num_in_flight == 1 else f"{worst.num_in_flight} requests were"
    return [
        f"The server stood still: nothing came from it for {worst.length_s:.1f} s, from "
        f"{worst.start_s:.1f} s to {worst.end_s:.1f} s, while {were} in flight ({worst.num_timed_out} timed "
        f"out in that time), and {back}{more}. The figures count them all."
    ]


def _sent_s(record: RequestRecord) -> float | None:
    return record.started_s if record.sent_s is None else record.sent_s


def covered_s(starts_s: Array, ends_s: Array, from_s: float, to_s: float) -> float:
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
