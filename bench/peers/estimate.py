"""Where a search for max goodput begins, how long its probes are, and how many it may take. Pure.

A request costs a server so much per prompt token and so much per output token. The closed loops say both:

    a = TTFT / (I * (c + 1) / 2)     of the loop with the fewest (c) in flight, I prompt tokens each: the
                                     middle one of c prompts that come together waits for half of them
    b = (O / R - I * a) / O          of the loop with the highest rate R of output tokens, O per answer

1. Capacity: requests of i prompt and o output tokens can be served at 1 / (i * a + o * b) per second.
2. Slack: the share of its SLOs that a server leaves for waiting. Alone, a long prompt (of which one in ten is
   longer) has its first token after i * a, and each further one takes the TPOT of the loop with the fewest
   in flight; slack is the least of 1 - time / bound.
3. The search starts at `START_SHARE` of the capacity times the slack: without slack at the lowest rate.
4. The lowest rate is one at which requests hardly overlap: `ALONE` of them are in flight on average, or up to
   `MOST_ALONE` where a probe would not offer enough of them otherwise. What fails there fails at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.figures.slo import Slo, SloMetric
from bench.peers.outcome import Mean

START_SHARE = 0.4
ALONE = 0.15  # requests in flight on average, at the lowest rate
MOST_ALONE = 0.3  # the same, where a server is so slow that its lowest rate is what a probe can measure
MIN_OUTPUT_SHARE = 0.1  # of a request's time: TTFT under load may seem to take all of it
DRAIN_S = 8.0  # of a probe, after its last arrival, and until the next one begins
MIN_PROBES = 5  # fewer find no bracket
MIN_REQUESTS = 12  # measured in a probe: fewer say nothing about a share of 90 %
MAX_PROBE_S = 90.0  # a slow server's probe is made longer, up to this, for as many requests
WARMUP_SHARE = 1 / 6  # of the asked length of a probe


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a trace's requests, in tokens."""

    mean_input: float
    long_input: float  # one request in ten is longer
    mean_output: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the closed loops say about a server under the trace."""

    capacity: float  # requests per second, all cores busy
    alone_s: float  # what one request takes by itself
    slack: float  # of the SLOs, for waiting; 0 or less: there is none even for a request alone

    @property
    def start_rate(self) -> float:
        """Of the search, before its limits."""
        return START_SHARE * self.capacity * max(0.0, self.slack)


def estimate(
    means: Sequence[Mean], input_tokens: int, output_tokens: int, lengths: Lengths, slos: Sequence[Slo]
) -> Estimate | None:
    """None: no loop gave figures to go by.

    Args:
        means: closed loops of `input_tokens` prompt and `output_tokens` output tokens.
    """
    known = [one for one in means if one.output_tok_per_s > 0 and one.ttft_p50_ms > 0]  # NaN is neither
    if not known:
        return None
    least = min(known, key=lambda one: one.concurrency)
    most = max(known, key=lambda one: one.output_tok_per_s)
    alone_prompt_s = least.ttft_p50_ms / 1e3 / (input_tokens * (least.concurrency + 1) / 2)
    request_s = output_tokens / most.output_tok_per_s
    output_s = max(request_s - input_tokens * alone_prompt_s, MIN_OUTPUT_SHARE * request_s)
    busy_prompt_s = (request_s - output_s) / input_tokens
    busy_output_s = output_s / output_tokens
    tpot_s = least.tpot_p50_ms / 1e3 if least.tpot_p50_ms > 0 else busy_output_s
    times = {SloMetric.TTFT: lengths.long_input * alone_prompt_s, SloMetric.TPOT: tpot_s}
    return Estimate(
        capacity=1 / (lengths.mean_input * busy_prompt_s + lengths.mean_output * busy_output_s),
        alone_s=lengths.mean_input * alone_prompt_s + lengths.mean_output * tpot_s,
        slack=min((1 - times[slo.metric] / slo.bound_s for slo in slos if slo.metric in times), default=1.0),
    )


def lowest_rate(found: Estimate | None, probe_s: float) -> float:
    """Where the search ends on the way down: requests hardly overlap, and the longest probe still measures
    enough of them.
    """
    enough = MIN_REQUESTS / (max(probe_s, MAX_PROBE_S) - WARMUP_SHARE * probe_s)
    return enough if found is None else max(enough, ALONE / found.alone_s)


def start_rate(found: Estimate | None, min_rate: float, max_rate: float) -> float:
    """Without an estimate the lowest rate, from where steps lead up."""
    if found is None or not math.isfinite(found.start_rate):
        return min_rate
    return min(max(round(found.start_rate, 3), min_rate), max_rate)


def probe_length_s(rate: float, probe_s: float) -> float:
    """`probe_s`, or as long as `MIN_REQUESTS` after the warm-up take, up to `MAX_PROBE_S`."""
    return min(max(probe_s, WARMUP_SHARE * probe_s + MIN_REQUESTS / rate), max(probe_s, MAX_PROBE_S))


def longest_search_s(left_s: float, share: float, probe_s: float) -> float:
    """When a search has to stop though it has probes left: those of a slow server are longer than asked."""
    least_s = MIN_PROBES * (max(probe_s, MAX_PROBE_S) + DRAIN_S)
    return min(left_s, max(least_s, 1.3 * share * left_s))


def affordable_probes(left_s: float, share: float, probe_s: float, most: int) -> int:
    """How many probes the next search may take of the time that is left, of which it gets `share`, and not
    less than `MIN_PROBES` where the whole of it has room; 0: too few to begin.
    """
    num_in_all = int(left_s / (probe_s + DRAIN_S))
    least = min(MIN_PROBES, most)
    return 0 if num_in_all < least else min(most, max(least, int(num_in_all * share)))
