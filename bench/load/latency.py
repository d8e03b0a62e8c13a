"""The times of one request, derived from its record: every definition once, for figures, SLOs and files
alike.

1. A record (moments, nothing computed) comes in.
2. `derive` gives its latencies. What does not exist is None: never zero, never negative.
3. `slo.evaluate` compares them with bounds, `metrics.summarize` pools them.

With s the scheduled time, t1 .. tk the moments of the chunks with content, e the last byte, and n the output
tokens:

=========  ====================  =======================================================================
TTFT       t1 - s                None without content. A first chunk of several tokens counts as it came.
TPOT       (E2E - TTFT)/(n - 1)  None for n <= 1. The denominator is tokens, not chunks.
ITL        t(i+1) - t(i)         gaps between chunks; pooled over requests for percentiles
itl_s      mean of those gaps    of one request; None with fewer than two chunks
gap_s      max of those gaps     the worst stall a reader sees; None with fewer than two chunks
E2E        e - s                 None if it never ended
send lag   sent - s              how late the client was; None if never sent
=========  ====================  =======================================================================

Counting from s, not from the send, keeps the wait of a late send in the figures (coordinated omission); the
`*_from_send` twins show the difference. The names TTFT, TPOT, ITL, E2E follow vLLM's benchmark.
"""

from __future__ import annotations

import operator

import msgspec

from bench.load.records import RequestRecord


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one request in seconds, and its output length in tokens."""

    output_len: int
    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None
    gap_s: float | None
    e2e_s: float | None
    send_lag_s: float | None
    ttft_from_send_s: float | None
    e2e_from_send_s: float | None


def output_len(record: RequestRecord) -> int:
    """Output tokens: the server's usage; else the sum of its per-chunk counts; else one per chunk."""
    if record.output_tokens is not None:
        return record.output_tokens
    return sum(record.chunk_tokens) if record.chunk_tokens else len(record.chunk_times_s)


def gaps(record: RequestRecord) -> list[float]:
    """Seconds between successive chunks with content."""
    return list(map(operator.sub, record.chunk_times_s[1:], record.chunk_times_s))


def derive(record: RequestRecord) -> Latency:
    tokens = output_len(record)
    first_s = record.chunk_times_s[0] if record.chunk_times_s else None
    waits = gaps(record)
    ttft_s = _since(first_s, record.scheduled_s)
    e2e_s = _since(record.end_s, record.scheduled_s)
    tpot_s = None
    if tokens > 1 and ttft_s is not None and e2e_s is not None:
        tpot_s = (e2e_s - ttft_s) / (tokens - 1)
    return Latency(
        output_len=tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        itl_s=sum(waits) / len(waits) if waits else None,
        gap_s=max(waits) if waits else None,
        e2e_s=e2e_s,
        send_lag_s=_since(record.sent_s, record.scheduled_s),
        ttft_from_send_s=_since(first_s, record.sent_s),
        e2e_from_send_s=_since(record.end_s, record.sent_s),
    )


def _since(moment_s: float | None, start_s: float | None) -> float | None:
    return None if moment_s is None or start_s is None else moment_s - start_s
