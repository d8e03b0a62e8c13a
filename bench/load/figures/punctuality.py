"""How punctual the client was: which requests it sent late, and which answers it may have read late. Pure.

1. A request was **sent late** when its send lag is above 5 % of the TTFT bound (10 ms without one): the lag
   is part of its TTFT.
2. An answer was **read late** when one of its chunks was read at the end of a stall of its client process,
   so long after the stall's start that a figure with a bound may be off by more than a quarter of that bound
   (without SLOs: a chunk by more than 50 ms). A stall adds at most its length to TTFT, gap and E2E, and to
   TPOT and ITL its length divided by the number of gaps. A stall in which nothing came does no harm, however
   long. The delay is an upper limit (the chunk may have come at the stall's end), hence a quarter and not a
   twentieth.
3. `tolerated` says how many of each a run may have. A single stall or late wake-up happens on any machine.
   In a long run it touches less than one request in a hundred and no p99. In a short one p99 is the maximum,
   and one late request says nothing about the client; so below 100 requests one in twenty is tolerated, and
   always one. What must not happen in so short a run is a request sent late by a quarter of the TTFT bound
   (50 ms without one): that would show in its figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load.figures.latency import output_len
from bench.load.figures.slo import Slo, SloMetric
from bench.load.records import ClientReport, RequestRecord

MAX_LAG_SHARE_OF_TTFT = 0.05
MAX_LAG_WITHOUT_SLO_S = 0.010
MAX_READ_SHARE = 0.25
MAX_READ_WITHOUT_SLO_S = 0.050
GROSS = 5  # times the limit of the send lag: a quarter of the TTFT bound, 50 ms without one
MIN_NUM_FOR_P99 = 100
CATCH_UP_S = 0.002  # after a stall, until what waited is read


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that could be late, how many were."""

    num: int
    num_late: int
    worst_s: float  # lag, or possible delay of a chunk
    is_too_much: bool


def max_send_lag_s(slos: Sequence[Slo]) -> float:
    """5 % of the TTFT bound, since the lag is part of every TTFT; 10 ms without one."""
    bounds_s = [slo.bound_s for slo in slos if slo.metric is SloMetric.TTFT]
    return MAX_LAG_SHARE_OF_TTFT * min(bounds_s) if bounds_s else MAX_LAG_WITHOUT_SLO_S


def tolerated(num: int) -> int:
    """How many of `num` requests may be late."""
    return num // 100 if num >= MIN_NUM_FOR_P99 else max(1, num // 20)


def send_lateness(records: Iterable[RequestRecord], slos: Sequence[Slo]) -> Lateness:
    limit_s = max_send_lag_s(slos)
    lags_s = [record.sent_s - record.scheduled_s for record in records if record.sent_s is not None]
    num, num_late = len(lags_s), sum(lag_s > limit_s for lag_s in lags_s)
    worst_s = max(lags_s, default=0.0)
    is_gross = num < MIN_NUM_FOR_P99 and worst_s > GROSS * limit_s
    return Lateness(
        num=num, num_late=num_late, worst_s=worst_s, is_too_much=is_gross or num_late > tolerated(num)
    )


def read_lateness(
    records: Iterable[RequestRecord], clients: Sequence[ClientReport], slos: Sequence[Slo]
) -> Lateness:
    stalls = {
        client.process: np.asarray(client.stalls_s, dtype=np.float64).reshape(-1, 2) for client in clients
    }
    nothing = np.empty((0, 2))
    answers = [record for record in records if record.chunk_times_s]
    delays = [read_delays_s(record, stalls.get(record.process, nothing)) for record in answers]
    late = [_is_off(record, delays_s, slos) for record, delays_s in zip(answers, delays, strict=True)]
    return Lateness(
        num=len(answers),
        num_late=sum(late),
        worst_s=max((float(delays_s.max()) for delays_s in delays), default=0.0),
        is_too_much=sum(late) > tolerated(len(answers)),
    )


def read_delays_s(record: RequestRecord, stalls_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each chunk, how long it may have waited to be read: since the start of the stall that ended as it
    was read. `stalls_s`: rows of start and end, by start."""
    times_s = np.asarray(record.chunk_times_s, dtype=np.float64)
    if not len(stalls_s):
        return np.zeros_like(times_s)
    before = np.searchsorted(stalls_s[:, 0], times_s, side="right") - 1
    starts_s, ends_s = stalls_s[before, 0], stalls_s[before, 1]
    is_late = (before >= 0) & (times_s <= ends_s + CATCH_UP_S)
    return np.where(is_late, times_s - starts_s, 0.0)


def _is_off(record: RequestRecord, delays_s: npt.NDArray[np.float64], slos: Sequence[Slo]) -> bool:
    first_s, last_s, worst_s = float(delays_s[0]), float(delays_s[-1]), float(delays_s.max())
    if not slos:
        return worst_s > MAX_READ_WITHOUT_SLO_S
    ends_s = max(first_s, last_s)  # what a mean over the answer can be off by, times its number of gaps
    off_s = {
        SloMetric.TTFT: first_s,
        SloMetric.E2E: last_s,
        SloMetric.GAP: worst_s,
        SloMetric.TPOT: ends_s / max(1, output_len(record) - 1),
        SloMetric.ITL: ends_s / max(1, len(delays_s) - 1),
    }
    return any(off_s[slo.metric] > MAX_READ_SHARE * slo.bound_s for slo in slos)
