"""What the goodput tables compare: pools, traces and SLOs, every fixed policy, and a mix that shifts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.policies import PolicySpec, parse_policy

CHUNKS = (256, 512, 128, 384, 1024, 2048)  # likely ones first
UNIFORM = "h100-llama3-8b:16"
MIXED = "h100-llama3-8b:8,h20-llama3-8b:8"
SHIFT = "shift"  # instead of a trace


@dataclass(frozen=True, slots=True)
class Row:
    """`trace`: "azure", "mooncake", or "shift"."""

    name: str
    pool: str
    trace: str
    slo: str


ROWS = (
    Row("uniform azure 0.3s/10ms", UNIFORM, "azure", "ttft=0.3s,tpot=10ms"),
    Row("uniform azure 0.5s/25ms", UNIFORM, "azure", "ttft=0.5s,tpot=25ms"),
    Row("uniform mooncake 2s/20ms", UNIFORM, "mooncake", "ttft=2s,tpot=20ms"),
    Row("uniform mooncake 5s/50ms", UNIFORM, "mooncake", "ttft=5s,tpot=50ms"),
    Row("mixed azure 0.3s/15ms", MIXED, "azure", "ttft=0.3s,tpot=15ms"),
    Row("mixed azure 0.5s/25ms", MIXED, "azure", "ttft=0.5s,tpot=25ms"),
    Row("mixed mooncake 2s/20ms", MIXED, "mooncake", "ttft=2s,tpot=20ms"),
    Row("mixed mooncake 5s/50ms", MIXED, "mooncake", "ttft=5s,tpot=50ms"),
    Row("uniform azure 0.5s/25ms gap 30ms", UNIFORM, "azure", "ttft=0.5s,tpot=25ms,gap=30ms"),
    Row("uniform shifting mix 0.5s/25ms", UNIFORM, SHIFT, "ttft=0.5s,tpot=25ms"),
)


def shifting_rows(azure: Sequence[TraceRow], seed: int = 0, phase_rows: int = 4_000) -> list[TraceRow]:
    """Prompt-heavy (long prompts, short answers), output-heavy (the reverse), and back, in phases of
    `phase_rows`. Lengths come from the Azure trace, one doubled and the other quartered."""
    draw = random.Random(seed)
    rows = []
    for phase in range(4):
        for index in range(phase_rows):
            row = azure[draw.randrange(len(azure))]
            long, short = (2.0, 0.25) if phase % 2 == 0 else (0.25, 2.0)
            rows.append(
                TraceRow(
                    float(phase * phase_rows + index),
                    max(1, round(row.input_tokens * long)),
                    max(1, round(row.output_tokens * short)),
                )
            )
    return rows


def colocated(num_workers: int) -> list[PolicySpec]:
    texts = [f"colocated:{chunk}:{order}" for chunk in CHUNKS for order in ("srf", "fcfs")]
    return [parse_policy(text, num_workers) for text in texts]


def static(num_workers: int) -> list[PolicySpec]:
    """All splits, the middle first; both orders."""
    middle = num_workers / 2
    splits = sorted(range(1, num_workers), key=lambda prefill: abs(prefill - middle))
    texts = [f"static:{p}p{num_workers - p}d:{order}" for p in splits for order in ("srf", "fcfs")]
    return [parse_policy(text, num_workers) for text in texts]
