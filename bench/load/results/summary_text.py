"""What a person reads when a run is over: a few lines from the result's dict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("worst gap", "gap"), ("E2E", "e2el"))
WIDTH = 26


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """The headline figures of one result."""
    loop = result["max_concurrency"]
    offered = f"closed loop of {loop}" if loop else f"open loop, {result['request_rate']} req/s"
    lines = [
        *verdict_lines(result),
        row("load", f"{offered} ({result['arrival']['kind']}), seed {result['arrival']['seed']}"),
        row("measured", f"{result['window']['rule']}"),
        row(
            "requests",
            f"{result['num_prompts']} offered, {result['completed']} ok, {result['failed']} failed",
        ),
        *error_lines(result),
        row("tokens", f"{result['total_input_tokens']} in, {result['total_output_tokens']} out"),
        row("throughput", f"{number(result['request_throughput'])} req/s"),
        row("output", f"{number(result['output_throughput'])} tok/s"),
    ]
    if result.get("slos_ms"):
        lines += slo_lines(result)
    lines.append(f"{'latency (ms)':{WIDTH}}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for title, name in LATENCIES:
        values = [result.get(f"{kind}_{name}_ms") for kind in ("mean", "median", "p90", "p99")]
        lines.append(f"{title:>{WIDTH - 2}}  " + "".join(f"{number(value):>10}" for value in values))
    lag = result["send_lag_ms"]
    lines.append(
        row(
            "client",
            f"send lag p99 {number(lag['p99'])} ms, CPU {number(result['client_cpu_pct'])} % of a core",
        )
    )
    return lines


def verdict_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [] if result["is_complete"] else ["INCOMPLETE: the run was cut short; this is what was measured"]
    return lines + [f"INVALID: {reason}" for reason in result["invalid_reasons"]]


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
    return [
        row("goodput", f"{number(result['request_goodput'])} req/s, {number(result['token_goodput'])} tok/s"),
        row("SLO attainment", f"{percent(result['slo_attainment'])} of all offered ({bounds})"),
    ]


def row(title: str, text: str) -> str:
    return f"{title:{WIDTH}}{text}"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
