"""What a plan had to leave out or shorten, in words. Pure: reads the `workload` block of a result;
and what is odd about a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.load.plan import Plan

MAX_SKIPPED_SHARE = 0.01
MIN_BLOCK_TOKENS = 64
MAX_TRACE_RATE = 1000.0  # requests per second, from which on a unit may have been mistaken
_TIME_UNITS = {
    "mooncake": "milliseconds",
    "canonical": "milliseconds",
    "burstgpt": "seconds",
    "azure": "calendar times",
}

_KINDS = (("rows", "trace rows"), ("conversations", "conversations"))
_LACK = {"rows": "tokens", "conversations": "an answer"}
_SHORTENED = (
    ("num_rows_oversize_clamped", "trace rows shortened"),
    ("num_oversize_clamped", "requests shortened"),
    ("num_turns_oversize_cut", "later turns cut"),
)


def left_out(workload: Mapping[str, Any]) -> str | None:
    """One line with the counts; None: everything is offered as it was meant."""
    parts = []
    for kind, name in _KINDS:
        skipped, looked_at = _skipped(workload, kind)
        if skipped:
            parts.append(f"{skipped} of {looked_at} {name} skipped (too long for the model)")
        if empty := workload.get(f"num_{kind}_empty"):
            of_them = name.removesuffix("s") if empty == 1 else name
            parts.append(f"{empty} {of_them} without {_LACK[kind]} dropped")
    for key, words in _SHORTENED:
        if workload.get(key):
            parts.append(f"{workload[key]} {words} (too long for the model)")
    return ", ".join(parts) or None


def workload_cautions(workload: Mapping[str, Any]) -> list[str]:
    cautions = []
    for kind, name in _KINDS:
        skipped, looked_at = _skipped(workload, kind)
        if skipped > MAX_SKIPPED_SHARE * looked_at:
            cautions.append(
                f"{skipped} of {looked_at} {name} ({skipped / looked_at:.1%}) were skipped, because they are "
                "too long for the model: the load is lighter than the file's. --oversize clamp keeps them."
            )
    cautions += _odd_times(workload)
    block_tokens = workload.get("block_tokens_scaled")
    if block_tokens is not None and block_tokens < MIN_BLOCK_TOKENS:
        cautions.append(
            f"The trace's prefix blocks are {block_tokens:g} tokens after scaling. Servers cache whole "
            "blocks of typically 16 to 64 tokens, so shared prefixes may not be found."
        )
    return cautions


def absurd_rate(plan: Plan, sent: Mapping[str, Any]) -> list[str]:
    """A trace that offers its own rhythm at a rate that no service has was likely meant in another unit."""
    rate = sent["offered_request_rate"] or 0.0
    if plan.trace is None or plan.arrival.kind != "trace" or rate <= MAX_TRACE_RATE:
        return []
    if rate / plan.trace.speed_up <= MAX_TRACE_RATE:  # it was asked for
        return []
    unit = _TIME_UNITS.get(plan.trace.format, "their own unit")
    return [
        f"The trace offered {rate:,.0f} req/s: its timestamps were read as {unit}. If they are in another "
        "unit, write them in this one, or give --rate or --speed-up."
    ]


def _odd_times(workload: Mapping[str, Any]) -> list[str]:
    cautions = []
    if num := workload.get("num_rows_out_of_order"):
        cautions.append(
            f"{num} of {workload.get('num_rows_file')} trace rows are earlier than one above them; they were "
            "sorted by time."
        )
    if num := workload.get("num_holes"):
        cautions.append(
            f"The trace has {num} hole{'' if num == 1 else 's'}, in which nothing is offered: the longest "
            f"begins {workload['longest_hole_from_run_s']:.1f} s into the run and lasts "
            f"{workload['longest_hole_run_s']:.1f} s, in the trace's time "
            f"{workload['longest_hole_trace_s']:.1f} s."
        )
    return cautions


def is_in_chats(workload: Mapping[str, Any]) -> bool:
    """Whether arrivals are chats of several requests, so that a rate is one of chats."""
    kind = workload.get("kind")
    return kind == "chat" or (kind == "sharegpt" and (workload.get("turns") or 1) > 1)


def _skipped(workload: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Rows or conversations that were too long, and how many were looked at: a trace is read whole."""
    skipped = workload.get(f"num_{kind}_oversize_skipped") or 0
    if kind == "rows":
        return skipped, (workload.get("num_rows_file") or 0) - (workload.get("num_rows_empty") or 0)
    return skipped, skipped + (workload.get("num_arrivals") or 0)
