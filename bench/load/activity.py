"""What was going on at the server at a moment, as arrays: who waited, who streamed, which tokens came.

1. `Activity.of` walks the records once.
2. Means over time and peaks are read off it, for the whole window and for each timeslice.

A request waits from its scheduled time to its first content (or its end), then runs until its end. It is in
flight from the send to the end. A request that was never sent is neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.load.latency import output_len
from bench.load.records import RequestRecord, Status

Floats = NDArray[np.float64]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Moments in seconds since the run's start. Token arrays run over chunks, the others over sent
    requests.
    """

    scheduled_s: Floats
    sent_s: Floats
    first_s: Floats  # first content, or the end without one
    end_s: Floats
    token_times_s: Floats  # moments of chunks with content
    tokens: Floats  # tokens in each, whatever became of the request
    ok_tokens: Floats  # the same, zero in requests that did not end OK

    @classmethod
    def of(cls, records: Sequence[RequestRecord], run_end_s: float) -> Activity:
        """A sent request without an end counts as in flight until `run_end_s`."""
        spans: list[tuple[float, float, float, float]] = []
        times: list[float] = []
        tokens: list[float] = []
        ok_tokens: list[float] = []
        for record in records:
            if record.sent_s is not None:
                end_s = run_end_s if record.end_s is None else record.end_s
                first_s = record.chunk_times_s[0] if record.chunk_times_s else end_s
                spans.append((record.scheduled_s, record.sent_s, first_s, end_s))
            counts = tokens_by_chunk(record)
            times += record.chunk_times_s
            tokens += counts
            ok_tokens += counts if record.status is Status.OK else [0.0] * len(counts)
        columns = np.array(spans, dtype=np.float64).reshape(-1, 4).T
        return cls(
            scheduled_s=columns[0],
            sent_s=columns[1],
            first_s=columns[2],
            end_s=columns[3],
            token_times_s=np.array(times, dtype=np.float64),
            tokens=np.array(tokens, dtype=np.float64),
            ok_tokens=np.array(ok_tokens, dtype=np.float64),
        )

    def mean_waiting(self, edges_s: Floats) -> Floats:
        """Mean number of requests without a first token, per interval between edges."""
        return mean_active(self.scheduled_s, self.first_s, edges_s)

    def mean_running(self, edges_s: Floats) -> Floats:
        return mean_active(self.first_s, self.end_s, edges_s)

    def mean_in_flight(self, edges_s: Floats) -> Floats:
        return mean_active(self.sent_s, self.end_s, edges_s)

    def max_in_flight(self, start_s: float, end_s: float) -> int:
        """Most requests between send and last byte at one moment of the interval."""
        touches = (self.sent_s <= end_s) & (self.end_s > start_s)
        starts, ends = self.sent_s[touches], self.end_s[touches]
        moments = np.concatenate([ends, starts])  # at equal moments, an end comes before a start
        steps = np.concatenate([-np.ones(len(ends)), np.ones(len(starts))])
        in_flight = np.cumsum(steps[np.argsort(moments, kind="stable")])
        return int(in_flight.max(initial=0))

    def ok_tokens_between(self, start_s: float, end_s: float) -> float:
        inside = (self.token_times_s >= start_s) & (self.token_times_s <= end_s)
        return float(self.ok_tokens[inside].sum())

    def max_ok_tokens_in_a_second(self, start_s: float, end_s: float) -> float:
        """Most tokens of OK requests in one of the whole seconds counted from `start_s`."""
        inside = (self.token_times_s >= start_s) & (self.token_times_s <= end_s)
        seconds = (self.token_times_s[inside] - start_s).astype(np.int64)
        return float(np.bincount(seconds, weights=self.ok_tokens[inside]).max(initial=0.0))


def mean_active(starts_s: Floats, ends_s: Floats, edges_s: Floats) -> Floats:
    """Time average of the number of open intervals [start, end) between each pair of edges; zero width gives
    0.
    """
    # Total open time before t, for each edge t: sum of clip(t - start, 0, end - start).
    before = np.array([np.clip(t - starts_s, 0.0, np.maximum(ends_s - starts_s, 0.0)).sum() for t in edges_s])
    widths = np.diff(edges_s)
    return np.divide(np.diff(before), widths, out=np.zeros(len(widths)), where=widths > 0)


def tokens_by_chunk(record: RequestRecord) -> list[float]:
    """Tokens of each chunk with content.

    The server's own counts where they add up to the output length; else the length spread evenly over the
    chunks, so that their sum is always the output length.
    """
    num_chunks, tokens = len(record.chunk_times_s), output_len(record)
    if len(record.chunk_tokens) == num_chunks and sum(record.chunk_tokens) == tokens:
        return [float(count) for count in record.chunk_tokens]
    return [tokens / num_chunks] * num_chunks if num_chunks else []
