"""The figures of a run as values: what `metrics.summarize` computes, and `result` and `validity` read.

Seconds, tokens and requests throughout; None where a figure does not exist (no samples, no length, no SLO).
"""

from __future__ import annotations

import msgspec

from bench.load.figures.slo import Slo
from bench.load.figures.timeslices import Timeslice
from bench.load.figures.window import Span
from bench.load.records import Status


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Exact quantiles with linear interpolation, population deviation: as vLLM's benchmark computes
    them.
    """

    num: int
    mean_s: float | None
    median_s: float | None
    std_s: float | None
    max_s: float | None
    percentiles_s: dict[str, float | None]  # "50", "99.9" -> seconds


class ErrorCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often requests of the window failed in one way."""

    status: str
    http_status: int | None
    error: str | None
    count: int


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Per second of the duration; what was delivered, per second of the window."""

    requests: float | None
    output_tokens: float | None
    total_tokens: float | None  # input and output
    max_output_tokens_in_a_second: float
    delivered_requests: float | None  # that ended inside the window, whenever they were offered
    delivered_output_tokens: float | None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What met the SLOs, over all offered requests of the window."""

    num_good: int
    attainment: float | None  # good / offered
    attainment_by_metric: dict[str, float | None]
    requests: float | None  # per second
    output_tokens: float | None  # of good requests, per second
    total_tokens: float | None  # input and output, of good requests, per second


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight over the window. A second half well above the first is overload: nothing is
    steady.
    """

    max_in_flight: int
    mean_in_flight: float
    mean_first_half: float
    mean_second_half: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    slos: tuple[Slo, ...]
    span: Span
    duration_s: float  # of the window and of what was still to be done for its requests
    num_run_offered: int  # of the whole run
    num_offered: int  # of the window
    by_status: dict[str, int]  # every status, of the window
    excluded_by_status: dict[str, int]  # of the requests outside it
    errors: tuple[ErrorCount, ...]  # most frequent first
    total_input_tokens: int  # of the window's OK requests
    total_output_tokens: int
    total_partial_output_tokens: int  # streamed by requests of the window that did not end OK
    total_cached_tokens: int
    throughput: Throughput
    goodput: Goodput | None  # None without SLOs
    load: Load
    distributions: dict[str, Distribution]  # by vLLM's names
    send_lag: Distribution  # of all sent requests of the window, failed ones too; has p50 and p99
    timeslices: tuple[Timeslice, ...]

    @property
    def completed(self) -> int:
        return self.by_status[Status.OK.value]

    @property
    def failed(self) -> int:
        return self.num_offered - self.completed
