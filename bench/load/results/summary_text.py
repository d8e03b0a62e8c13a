"""What a person reads when a run is over: a few lines from the result's dict. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bench.load.results.workload_text import is_in_chats, left_out

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("worst gap", "gap"), ("E2E", "e2el"))
WIDTH = 26
_PERCENTILE = re.compile(r"p[\d.]+_ttft_ms")


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """The headline figures of one result."""
    skipped = left_out(result["workload"])
    lines = [
        *verdict_lines(result),
        *load_lines(result),
        row("measured", f"{result['window']['rule']}"),
        row("requests", requests_text(result)),
        *error_lines(result),
        *([] if skipped is None else [row("left out", skipped)]),
        row("tokens", tokens_text(result)),
        *cached_lines(result),
        row("throughput", f"{number(result['request_throughput'])} req/s"),
        row("output", f"{number(result['output_throughput'])} tok/s"),
        *delivered_lines(result["window"]),
    ]
    if result.get("slos_ms"):
        lines += slo_lines(result)
    return [*lines, *latency_lines(result), client_line(result)]


def load_lines(result: Mapping[str, Any]) -> list[str]:
    """What was asked for and, where that is another thing, the rate of requests that came of it."""
    loop, arrival = result["max_concurrency"], result["arrival"]
    of_chats = is_in_chats(result["workload"])
    if loop:
        offered = f"closed loop of {loop}{' chats' if of_chats else ''}"
    elif arrival["rate"] is None:
        offered = f"open loop ({arrival['kind']})"
    else:
        unit = "chats/s" if of_chats else "req/s"
        offered = f"open loop, {arrival['rate']:.4g} {unit} ({arrival['kind']})"
    if of_chats:
        num_chats = result["workload"]["num_arrivals"]
        offered += f", {num_chats} chats of {result['workload']['num_requests']} requests"
    lines = [row("load", f"{offered}, seed {arrival['seed']}")]
    if not loop and result["offered_request_rate"] is not None:
        lines.append(row("offered", f"{result['offered_request_rate']:.4g} req/s"))
    return lines


def requests_text(result: Mapping[str, Any]) -> str:
    window, became = result["window"], f"{result['completed']} ok, {result['failed']} failed"
    if window["is_whole_run"]:
        return f"{result['num_prompts']} planned, {result['num_sent']} sent, {became}"
    run = f"{window['num_run_offered']} planned, {window['num_run_sent']} sent"
    return f"{run}; {result['num_prompts']} of them due in the window: {became}"


def tokens_text(result: Mapping[str, Any]) -> str:
    partial = result.get("total_partial_output_tokens")
    of_failed = f", and {partial} out in requests that failed" if partial else ""
    return f"{result['total_input_tokens']} in, {result['total_output_tokens']} out{of_failed}"


def delivered_lines(window: Mapping[str, Any]) -> list[str]:
    """Of a window: what came in it, of whatever request; the other rates are of the requests due in it."""
    if window["is_whole_run"] or window.get("delivered_requests_per_s") is None:
        return []
    rates = f"{number(window['delivered_requests_per_s'])} req/s"
    tokens = f"{number(window['delivered_output_tokens_per_s'])} tok/s"
    return [row("delivered in the window", f"{rates}, {tokens}, of requests due at any time")]


def cached_lines(result: Mapping[str, Any]) -> list[str]:
    cached, total = result["total_cached_tokens"], result["total_input_tokens"]
    if not cached or not total:
        return []
    return [row("cached", f"{cached} tokens, {percent(cached / total)} of the input")]


def latency_lines(result: Mapping[str, Any]) -> list[str]:
    """A row per figure: mean, median and the percentiles that were asked for, over n samples."""
    percents = [key[1 : -len("_ttft_ms")] for key in result if _PERCENTILE.fullmatch(key)]
    columns = [("mean", "mean"), ("p50", "median"), *((f"p{p}", f"p{p}") for p in percents if p != "50")]
    lines = [f"{'latency (ms)':{WIDTH}}" + "".join(f"{name:>10}" for name, _ in columns) + f"{'n':>10}"]
    for title, name in LATENCIES:
        values = [number(result.get(f"{kind}_{name}_ms")) for _, kind in columns]
        values.append(str(result["num_samples"].get(name, 0)))
        lines.append(f"{title:>{WIDTH - 2}}  " + "".join(f"{value:>10}" for value in values))
    return lines


def client_line(result: Mapping[str, Any]) -> str:
    lag, cpu = result["send_lag_ms"]["p99"], result["client_cpu_pct"]
    sending = _nothing_sent(result) if lag is None else f"send lag p99 {number(lag)} ms"
    used = "CPU not measured" if cpu is None else f"CPU {number(cpu)} % of a core"
    return row("client", f"{sending}, {used}")


def _nothing_sent(result: Mapping[str, Any]) -> str:
    if not result["num_prompts"] and result["window"]["num_run_sent"]:
        return "no request was due in the window"
    is_whole = result["window"]["is_whole_run"]
    return "nothing was sent" if is_whole else "nothing that was due in the window was sent"


def verdict_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [] if result["is_complete"] else ["INCOMPLETE: the run was cut short; this is what was measured"]
    lines += [f"INVALID: {reason}" for reason in result["invalid_reasons"]]
    return lines + [f"caution: {caution}" for caution in result["cautions"]]


def error_lines(result: Mapping[str, Any]) -> list[str]:
    return [
        row("", f"{error['count']} x {error['status']}: {error['error'] or 'no message'}")
        for error in result["error_counts"][:5]
    ]


def slo_lines(result: Mapping[str, Any]) -> list[str]:
    by_metric = result["slo_attainment_by_metric"]
    bounds = ", ".join(
        f"{name} <= {bound:g} ms: {percent(by_metric[name])}" for name, bound in result["slos_ms"].items()
    )
    of_sent = ""
    if result["num_sent"] < result["num_prompts"]:
        of_sent = f", {percent(result['slo_attainment_of_sent'])} of those sent"
    return [
        row("goodput", f"{number(result['request_goodput'])} req/s, {number(result['token_goodput'])} tok/s"),
        row("SLO attainment", f"{percent(result['slo_attainment'])} of all offered{of_sent} ({bounds})"),
    ]


def row(title: str, text: str) -> str:
    return f"{title:{WIDTH}}{text}"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
