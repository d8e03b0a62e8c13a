"""The sections of the result file that follow from a summary. Milliseconds in `_ms` keys, else seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bench.load.figures.metrics import per_second
from bench.load.figures.slo import slos_to_ms
from bench.load.figures.summary import Distribution, Summary
from bench.load.figures.timeslices import Timeslice
from bench.load.figures.validity import max_send_lag_s
from bench.load.plan import Arrival, Plan
from bench.load.records import RunRecord, Status

UNSENT = frozenset((Status.SKIPPED, Status.CLIENT))  # the client gave them up, or could not send them


def trace_block(plan: Plan) -> dict[str, Any] | None:
    if plan.trace is None:
        return None
    fields: dict[str, Any] = msgspec.to_builtins(plan.trace)
    fields["speedup"] = fields.pop("speed_up")
    return fields


def window_block(run: RunRecord, summary: Summary) -> dict[str, Any]:
    span, load = summary.span, summary.load
    return {
        "rule": span.rule,
        "start_s": span.start_s,
        "end_s": span.end_s,
        "length_s": span.length_s,
        "is_whole_run": span.is_whole_run,
        "num_offered": summary.num_offered,
        "num_run_offered": summary.num_run_offered,
        "num_run_sent": sum(record.status not in UNSENT for record in run.records),
        "excluded_by_status": summary.excluded_by_status,
        "delivered_requests_per_s": summary.throughput.delivered_requests,
        "delivered_output_tokens_per_s": summary.throughput.delivered_output_tokens,
        "mean_in_flight": load.mean_in_flight,
        "mean_in_flight_first_half": load.mean_first_half,
        "mean_in_flight_second_half": load.mean_second_half,
    }


def sent_keys(run: RunRecord, summary: Summary, arrival: Arrival) -> dict[str, Any]:
    """What was planned for the window, and what of it was sent before the run ended or was interrupted.

    `offered_request_rate`: the requests sent of the window, per second between their scheduled moments: n of
    them have n - 1 gaps, so the rate is (n - 1) / (last - first). In a chat, each turn is a request. Two
    moments are the least that have a rate; a closed loop and a burst offer none.
    """
    measured = (record for record in run.records if summary.span.contains(record))
    sent_s = [record.scheduled_s for record in measured if record.status not in UNSENT]
    offering_s = max(sent_s) - min(sent_s) if sent_s else 0.0
    has_rate = arrival.closed_loop is None and arrival.kind != "burst"
    num_good = None if summary.goodput is None else summary.goodput.num_good
    return {
        "num_prompts": summary.num_offered,
        "num_sent": len(sent_s),
        "slo_attainment_of_sent": None if num_good is None or not sent_s else num_good / len(sent_s),
        "offered_request_rate": per_second(len(sent_s) - 1, offering_s) if has_rate else None,
    }


def counts_keys(summary: Summary) -> dict[str, Any]:
    return {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "failures": {name: count for name, count in summary.by_status.items() if count and name != "ok"},
        "error_counts": msgspec.to_builtins(summary.errors),
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "total_partial_output_tokens": summary.total_partial_output_tokens,
        "total_cached_tokens": summary.total_cached_tokens,
    }


def rates_keys(summary: Summary, environment: Mapping[str, Any]) -> dict[str, Any]:
    through, good = summary.throughput, summary.goodput
    num_cores, num_accelerators = environment.get("num_cores"), environment.get("num_accelerators")
    goodput = None if good is None else good.requests
    token_goodput = None if good is None else good.output_tokens
    return {
        "request_throughput": through.requests,
        "output_throughput": through.output_tokens,
        "total_token_throughput": through.total_tokens,
        "max_output_tokens_per_s": through.max_output_tokens_in_a_second,
        "max_concurrent_requests": summary.load.max_in_flight,
        "slos_ms": slos_to_ms(summary.slos),
        "num_good": None if good is None else good.num_good,
        "slo_attainment": None if good is None else good.attainment,
        "slo_attainment_by_metric": {} if good is None else good.attainment_by_metric,
        "request_goodput": goodput,
        "token_goodput": token_goodput,
        "total_token_goodput": None if good is None else good.total_tokens,
        "num_cores": num_cores,
        "num_accelerators": num_accelerators,
        "per_core": {
            "output_throughput": _per(through.output_tokens, num_cores),
            "request_goodput": _per(goodput, num_cores),
            "token_goodput": _per(token_goodput, num_cores),
        },
        "output_throughput_per_gpu": _per(through.output_tokens, num_accelerators),
        "goodput_per_gpu": _per(goodput, num_accelerators),
    }


def latencies_keys(summary: Summary) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, one in summary.distributions.items():
        keys |= {
            f"mean_{name}_ms": _ms(one.mean_s),
            f"median_{name}_ms": _ms(one.median_s),
            f"std_{name}_ms": _ms(one.std_s),
            f"max_{name}_ms": _ms(one.max_s),
            **{f"p{percent}_{name}_ms": _ms(value) for percent, value in one.percentiles_s.items()},
        }
    keys["num_samples"] = {name: one.num for name, one in summary.distributions.items()}
    keys["send_lag_ms"] = _send_lag(summary.send_lag) | {"limit": _ms(max_send_lag_s(summary.slos))}
    return keys


def _send_lag(lag: Distribution) -> dict[str, Any]:
    quantiles = {f"p{percent}": _ms(value) for percent, value in lag.percentiles_s.items()}
    return {**quantiles, "max": _ms(lag.max_s), "num": lag.num}


def timeslice_row(one: Timeslice) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    fields["ttft_p50_ms"], fields["ttft_p99_ms"] = (
        _ms(fields.pop("ttft_p50_s")),
        _ms(fields.pop("ttft_p99_s")),
    )
    return fields


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _per(amount: float | None, count: float | None) -> float | None:
    return amount / count if amount is not None and count else None
