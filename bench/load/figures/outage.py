"""Whether the server went away while it was measured. Pure.

1. A request that cannot open a connection (`is_unreachable`) says that nobody listens at its moment.
2. If answers had come before, the server was there and died. The outage begins with the first connection
   that broke after the last answer before that moment: streams are cut at the death itself, while the next
   refusal waits for the next request.
3. If answers come again after the last refusal, it came back; several outages in one run are told as one.

A load that no connection survives, but that new connections do, is no outage: servers may cut streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.load.records import RequestRecord, RunRecord, Status


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the run's start."""

    start_s: float
    end_s: float | None  # when an answer began again; None: the server did not come back
    num_ok_before: int  # requests that had ended OK
    num_refused: int  # requests for which no connection could be opened
    num_offered_after: int  # requests that were due from the start of the outage on, whatever became of them


def find_outage(records: Sequence[RequestRecord]) -> Outage | None:
    """None: every connection could be opened, or nothing had succeeded before the first that could not."""
    refused = [record for record in records if record.is_unreachable]
    if not refused:
        return None
    first_s = min(_end_s(record) for record in refused)
    ok_ends_s = [_end_s(record) for record in records if record.status is Status.OK]
    before_s = [end_s for end_s in ok_ends_s if end_s <= first_s]
    if not before_s:
        return None
    last_ok_s = max(before_s)
    start_s = min(
        _end_s(record)
        for record in records
        if record.status is Status.CONNECTION and last_ok_s <= _end_s(record) <= first_s
    )
    last_s = max(_end_s(record) for record in refused)
    back_s = [
        record.chunk_times_s[0]
        for record in records
        if record.status is Status.OK and record.chunk_times_s and record.chunk_times_s[0] > last_s
    ]
    return Outage(
        start_s=start_s,
        end_s=min(back_s, default=None),
        num_ok_before=len(before_s),
        num_refused=len(refused),
        num_offered_after=sum(record.scheduled_s >= start_s for record in records),
    )


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a server that no longer answers, where no connection was refused after an answer."""

    start_s: float  # when a connection broke after the last sign of it, else that sign
    was_heard: bool  # headers or content had come from it
    num_offered_after: int  # requests due from then on


def find_silence(records: Sequence[RequestRecord]) -> Silence:
    heard_s = [max(signs(record)) for record in records if signs(record)]
    last_s = max(heard_s, default=min((record.scheduled_s for record in records), default=0.0))
    broke_s = [_end_s(one) for one in records if one.status is Status.CONNECTION and _end_s(one) >= last_s]
    start_s = min(broke_s, default=last_s)
    return Silence(
        start_s=start_s,
        was_heard=bool(heard_s),
        num_offered_after=sum(record.scheduled_s >= start_s for record in records),
    )


def signs(record: RequestRecord) -> list[float]:
    """Moments at which something came from the server; a frozen one still takes connections."""
    headers_s = [] if record.headers_s is None else [record.headers_s]
    answered_s = [_end_s(record)] if record.status in (Status.OK, Status.REFUSED) else []
    return [*headers_s, *record.chunk_times_s, *answered_s]


def was_unreachable(run: RunRecord) -> bool:
    """Whether some connection could not be opened: what became of the requests then is not the load's
    doing.
    """
    return any(record.is_unreachable for record in run.records)


def may_be_gone(run: RunRecord) -> bool:
    """Whether the run gives cause to ask the server if it is still there: a connection broke, an answer did
    not come in time, or nothing succeeded.
    """
    statuses = {record.status for record in run.records}
    return bool(statuses & {Status.CONNECTION, Status.TIMEOUT}) or Status.OK not in statuses


def _end_s(record: RequestRecord) -> float:
    return record.scheduled_s if record.end_s is None else record.end_s
