"""Where a search for max goodput begins, and how many probes it may take. Pure.

A request costs a server so much per prompt token and so much per output token. The closed loops say both:

    a = TTFT / (I * (c + 1) / 2)     of the loop with the fewest (c) in flight, I prompt tokens each: the
                                     middle one of c prompts that come together waits for half of them
    b = (O / R - I * a) / O          of the loop with the highest rate R of output tokens, O per answer

so requests of i prompt and o output tokens can be served at 1 / (i * a + o * b) per second. Where SLOs bind
lies below: between a sixth and nine tenths of that, in what was measured so far, hence `START_SHARE`, their
middle on the log scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.peers.outcome import Mean

START_SHARE = 0.4
MIN_OUTPUT_SHARE = 0.1  # of a request's time: TTFT under load may seem to take all of it
DRAIN_S = 10.0  # of a probe, after its last arrival, and until the next one begins
MIN_PROBES = 4  # fewer find no bracket


def capacity_estimate(
    means: Sequence[Mean],
    input_tokens: int,
    output_tokens: int,
    mean_input_tokens: float,
    mean_output_tokens: float,
) -> float | None:
    """Requests per second of the mean lengths; None: no loop gave figures to go by.

    Args:
        means: closed loops of `input_tokens` prompt and `output_tokens` output tokens.
    """
    known = [one for one in means if one.output_tok_per_s > 0 and one.ttft_p50_ms > 0]  # NaN is neither
    if not known:
        return None
    least = min(known, key=lambda one: one.concurrency)
    most = max(known, key=lambda one: one.output_tok_per_s)
    per_prompt_token_s = least.ttft_p50_ms / 1e3 / (input_tokens * (least.concurrency + 1) / 2)
    request_s = output_tokens / most.output_tok_per_s
    output_s = max(request_s - input_tokens * per_prompt_token_s, MIN_OUTPUT_SHARE * request_s)
    per_prompt_token_s = (request_s - output_s) / input_tokens
    return 1 / (mean_input_tokens * per_prompt_token_s + mean_output_tokens * output_s / output_tokens)


def start_rate(capacity: float | None, min_rate: float, max_rate: float) -> float:
    """Where to begin; without an estimate at the lowest rate, from where steps lead up."""
    if capacity is None or not math.isfinite(capacity):
        return min_rate
    return min(max(round(START_SHARE * capacity, 3), min_rate), max_rate)


def affordable_probes(left_s: float, num_searches: int, probe_s: float, most: int) -> int:
    """How many probes the next of `num_searches` may take of the time that is left; 0: too few to begin."""
    num = min(most, int(left_s / num_searches / (probe_s + DRAIN_S)))
    return num if num >= min(MIN_PROBES, most) else 0
