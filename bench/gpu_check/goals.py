"""What the GPU path aims at on an H100: which figures of the tables have a goal beside them. Pure.

A share of a ceiling is one of this run (`bench.gpu_check.timing`). A decode step and the gap between two are
those of Llama-3-8B's shape as workers run them (`bench.gpu_check.served`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.gpu_check.report import Goal

MANY_KEYS: Final = 128 * 1024  # of all rows of a decode step together
LONG_CONTEXT: Final = 32 * 1024
LONG_PROMPT: Final = 8 * 1024
MANY_BYTES: Final = 10**9
STEP_MODEL: Final = "Llama-3-8B"
STEP_ROWS: Final = (1, 16, 64)

OF_COPY_MANY_KEYS: Final = 0.85
OF_COPY_LONG_CONTEXT: Final = 0.60
OF_PRODUCT: Final = 0.60
OF_COPY_ROW_WISE: Final = 0.80
FAST_OF_ROOFLINE: Final = 0.75
EXACT_OF_FAST: Final = 0.80
MOST_GAP_US: Final = 50.0


def decode_attention(batch: int, context: int) -> float | None:
    """Share of the copy ceiling; None: nothing is aimed at for so few keys."""
    if batch * context >= MANY_KEYS:
        return OF_COPY_MANY_KEYS
    return OF_COPY_LONG_CONTEXT if batch == 1 and context >= LONG_CONTEXT else None


def prefill_attention(length: int) -> float | None:
    """Share of the product ceiling."""
    return OF_PRODUCT if length >= LONG_PROMPT else None


def row_wise(num_bytes: float) -> float | None:
    """Share of the copy ceiling, of norms, rotary and block moves that read and write so many bytes."""
    return OF_COPY_ROW_WISE if num_bytes >= MANY_BYTES else None


def of_ceiling(what: str, share: float, wanted: float) -> Goal:
    return Goal(what, share * 100, wanted * 100, " %")


def decode_step(
    model: str, num_rows: int, least_s: float, steps: Mapping[str, float], gaps_us: Mapping[str, float]
) -> tuple[Goal, ...]:
    """Of one decode step: `least_s` by the roofline; `steps` in seconds and `gaps_us`, by mode."""
    if model != STEP_MODEL or num_rows not in STEP_ROWS or not {"exact", "fast"} <= steps.keys():
        return ()
    return (
        of_ceiling("fast, of roofline", least_s / steps["fast"], FAST_OF_ROOFLINE),
        Goal("exact, of fast", steps["fast"] / steps["exact"], EXACT_OF_FAST, " x"),
        *(
            Goal(f"{mode}, gap between steps", gap_us, MOST_GAP_US, " us", at_most=True)
            for mode, gap_us in gaps_us.items()
        ),
    )
