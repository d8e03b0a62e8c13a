"""The figures of a run: latencies, throughput, goodput, failures, over the whole run or a window of it. Pure.

1. `window.resolve` says which requests are measured (by scheduled time) and how long the window is.
2. Each record is derived once (`latency.derive`) and held against the SLOs (`slo.evaluate`).
3. `summarize` pools them into a `Summary`; `result` writes it, `validity` judges it, `search` reads its
   attainment.

What is counted over what:

- Attainment, goodput, failures: **all offered** requests of the window. A failed, timed out, cancelled or
  skipped request met nothing.
- Latency distributions: the requests that ended OK, and of those the ones that have the figure; `num` says
  how many.
- Rates, of throughput and of goodput: the requests scheduled in the window (the whole run: all of them) ÷ the
  duration, from the window's start to the last end of these requests. So a rate is its total ÷ the duration,
  as readers of vLLM's files assume, no goodput is above its throughput, and a server that falls behind shows
  it: what it still had to do for these requests is part of the time.
- What was delivered inside a window, whenever it was offered, is told apart from them: tokens of OK requests
  whose chunk came inside it, and OK requests that ended in it, ÷ its length.
- Partial tokens: what requests streamed that did not end OK. They are in no rate, and counted apart.

What cannot be computed (no samples, no length, no SLO) is None.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from bench.load.figures.activity import Activity
from bench.load.figures.latency import Latency, derive, gaps
from bench.load.figures.slo import Slo, evaluate, is_good
from bench.load.figures.summary import Distribution, ErrorCount, Goodput, Load, Summary, Throughput
from bench.load.figures.timeslices import slice_run
from bench.load.figures.window import WHOLE_RUN, Span, SteadyWindow, Window, resolve
from bench.load.records import RequestRecord, RunRecord, Status
from cluster.errors import ConfigError

DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_NUM_CHUNKS = re.compile(r"\bafter (\d+) chunks?\b(?= with content)")


def summarize(
    run: RunRecord,
    slos: Sequence[Slo] = (),
    window: Window | SteadyWindow = WHOLE_RUN,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> Summary:
    """All figures of a run.

    Raises:
        ConfigError: a percentile outside 0 to 100.
    """
    for percentile in percentiles:
        if not 0 <= percentile <= 100:  # NaN too
            raise ConfigError(f"percentile {percentile}: give numbers from 0 to 100, such as 50, 90, 95, 99")
    span = resolve(window, run)
    latencies = [derive(record) for record in run.records]
    activity = Activity.of(run.records, run.wall_s)
    inside = [span.contains(record) for record in run.records]
    measured = [(r, x) for r, x, is_in in zip(run.records, latencies, inside, strict=True) if is_in]
    outside = [record for record, is_in in zip(run.records, inside, strict=True) if not is_in]
    done = [(record, latency) for record, latency in measured if record.status is Status.OK]
    duration_s = _duration_s(span, (record for record, _ in measured))
    lags = [x.send_lag_s for _, x in measured if x.send_lag_s is not None]
    return Summary(
        slos=tuple(slos),
        span=span,
        duration_s=duration_s,
        num_run_offered=len(run.records),
        num_offered=len(measured),
        by_status=_by_status(record for record, _ in measured),
        excluded_by_status={name: count for name, count in _by_status(outside).items() if count},
        errors=_errors(record for record, _ in measured),
        total_input_tokens=sum(_input_len(record) for record, _ in done),
        total_output_tokens=sum(latency.output_len for _, latency in done),
        total_partial_output_tokens=sum(
            latency.output_len for record, latency in measured if record.status is not Status.OK
        ),
        total_cached_tokens=sum(record.cached_tokens or 0 for record, _ in done),
        throughput=_throughput(run.records, done, activity, span, duration_s),
        goodput=_goodput(measured, slos, duration_s) if slos else None,
        load=_load(activity, span),
        distributions=_distributions(done, percentiles),
        send_lag=distribution(lags, sorted({*percentiles, 50.0, 99.0})),
        timeslices=slice_run(run.records, latencies, activity),
    )


def distribution(values_s: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    names = [percentile_name(percentile) for percentile in percentiles]
    if not values_s:
        nothing: dict[str, float | None] = dict.fromkeys(names)
        return Distribution(num=0, mean_s=None, median_s=None, std_s=None, max_s=None, percentiles_s=nothing)
    values = np.asarray(values_s, dtype=np.float64)
    quantiles = np.percentile(values, [*percentiles, 50.0]).tolist()
    return Distribution(
        num=len(values),
        mean_s=float(values.mean()),
        median_s=quantiles[-1],
        std_s=float(values.std()),
        max_s=float(values.max()),
        percentiles_s=dict(zip(names, quantiles[:-1], strict=True)),
    )


def percentile_name(percentile: float) -> str:
    """`99` for 99.0, `99.9` for 99.9: what vLLM puts after the p."""
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def _distributions(
    done: Sequence[tuple[RequestRecord, Latency]], percentiles: Sequence[float]
) -> dict[str, Distribution]:
    of_requests = [latency for _, latency in done]
    pooled_gaps = [gap for record, _ in done for gap in gaps(record)]
    e2es = [x.e2e_s for x in of_requests]
    samples: dict[str, Iterable[float | None]] = {
        "ttft": [x.ttft_s for x in of_requests],
        "tpot": [x.tpot_s for x in of_requests],
        "itl": pooled_gaps,
        "gap": [x.gap_s for x in of_requests],
        "e2el": e2es,
        "client_queue_time": [x.send_lag_s for x in of_requests],
        # vLLM's name for counting from the scheduled time, which all of ours do.
        "e2el_including_client_queue": e2es,
        "ttft_from_send": [x.ttft_from_send_s for x in of_requests],
        "e2el_from_send": [x.e2e_from_send_s for x in of_requests],
    }
    return {
        name: distribution([value for value in values if value is not None], percentiles)
        for name, values in samples.items()
    }


def _duration_s(span: Span, measured: Iterable[RequestRecord]) -> float:
    """From the window's start to its end, or to the last end of its requests, whichever is later."""
    last_s = max((record.end_s for record in measured if record.end_s is not None), default=span.end_s)
    return max(span.length_s, last_s - span.start_s)


def _throughput(
    records: Sequence[RequestRecord],
    done: Sequence[tuple[RequestRecord, Latency]],
    activity: Activity,
    span: Span,
    duration_s: float,
) -> Throughput:
    output_tokens = sum(latency.output_len for _, latency in done)
    input_tokens = sum(_input_len(record) for record, _ in done)
    num_ended = sum(_within(record.end_s, span) for record in records if record.status is Status.OK)
    delivered = activity.ok_tokens_between(span.start_s, span.end_s)
    return Throughput(
        requests=per_second(len(done), duration_s),
        output_tokens=per_second(output_tokens, duration_s),
        total_tokens=per_second(input_tokens + output_tokens, duration_s),
        max_output_tokens_in_a_second=activity.max_ok_tokens_in_a_second(span.start_s, span.end_s),
        delivered_requests=per_second(num_ended, span.length_s),
        delivered_output_tokens=per_second(delivered, span.length_s),
    )


def _goodput(
    measured: Sequence[tuple[RequestRecord, Latency]], slos: Sequence[Slo], length_s: float
) -> Goodput:
    verdicts = [evaluate(slos, record.status, latency) for record, latency in measured]
    good = [
        (record, latency)
        for (record, latency), met in zip(measured, verdicts, strict=True)
        if is_good(record.status, met)
    ]
    output_tokens = sum(latency.output_len for _, latency in good)
    input_tokens = sum(_input_len(record) for record, _ in good)
    return Goodput(
        num_good=len(good),
        attainment=_share(len(good), len(measured)),
        attainment_by_metric={
            slo.metric.value: _share(sum(met[i] for met in verdicts), len(measured))
            for i, slo in enumerate(slos)
        },
        requests=per_second(len(good), length_s),
        output_tokens=per_second(output_tokens, length_s),
        total_tokens=per_second(input_tokens + output_tokens, length_s),
    )


def _load(activity: Activity, span: Span) -> Load:
    end_s = max(span.start_s, span.end_s)
    halves = activity.mean_in_flight(np.linspace(span.start_s, end_s, 3))
    return Load(
        max_in_flight=activity.max_in_flight(span.start_s, end_s),
        mean_in_flight=float(halves.mean()),
        mean_first_half=float(halves[0]),
        mean_second_half=float(halves[1]),
    )


def _by_status(records: Iterable[RequestRecord]) -> dict[str, int]:
    counts = Counter(record.status for record in records)
    return {status.value: counts[status] for status in Status}


def _errors(records: Iterable[RequestRecord]) -> tuple[ErrorCount, ...]:
    """Failures that differ only in how many chunks had come are one kind: of 100 streams that were cut, each
    had come to another place. Its error tells from where to where.
    """
    kinds: dict[tuple[str, int | None, str | None], list[str | None]] = {}
    for record in records:
        if record.status is not Status.OK:
            shape = None if record.error is None else _NUM_CHUNKS.sub("", record.error)
            kinds.setdefault((record.status.value, record.http_status, shape), []).append(record.error)
    return tuple(
        ErrorCount(status=status, http_status=http_status, error=_one_error(errors), count=len(errors))
        for (status, http_status, _), errors in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    )


def _one_error(errors: Sequence[str | None]) -> str | None:
    """One sentence for errors of one shape."""
    first = errors[0]
    if first is None or len(set(errors)) == 1:
        return first
    nums = [int(match[1]) for error in errors if error and (match := _NUM_CHUNKS.search(error))]
    return _NUM_CHUNKS.sub(f"after {min(nums)} to {max(nums)} chunks", first)


def _input_len(record: RequestRecord) -> int:
    """The server's usage, else the plan's count."""
    return (record.planned_input_tokens or 0) if record.input_tokens is None else record.input_tokens


def _within(moment_s: float | None, span: Span) -> bool:
    return moment_s is not None and span.start_s <= moment_s <= span.end_s


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def per_second(amount: float, length_s: float) -> float | None:
    return amount / length_s if length_s > 0 and math.isfinite(length_s) else None
