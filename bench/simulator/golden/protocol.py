"""The highest rate per GPU, found as DistServe's simulator finds it, for any simulated system.

1. `NUM_REQUESTS` requests arrive at an empty system, the first at 0, the gaps exponential; all of them count.
2. A rate passes if the 90 % quantile of TTFT and that of TPOT are each below their targets. (We ask for 90 %
   of the requests to be within both.)
3. The rate per GPU is bisected from `MOST_PER_GPU` down until the bracket is no wider than `WIDTH`; the
   answer is the highest rate that passed. So with their width the answers are 1/32 of `MOST_PER_GPU` apart:
   a published 1.56 says that 1.5625 passed and 1.71875 did not.

Source: github.com/LLMServe/DistServe, `simdistserve/benchmarks/{search_binary,simulate_dist}.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from bench.load.plans.trace_formats import TraceRow
from bench.simulator.fleet.request import Request
from cluster.slo_classes import Targets

NUM_REQUESTS = 300
MOST_PER_GPU, WIDTH = 5.0, 0.25
PUBLISHED = 1.5625  # "Best per GPU rate: 1.56", in `simdistserve/README.md`
SHARE = 90.0

Serve = Callable[[Sequence[Request]], None]


def requests_at(rows: Sequence[TraceRow], rate: float, num: int, seed: int) -> list[Request]:
    """Rows drawn without repeating; an answer's tokens come after the first one, so it has one more."""
    draw = random.Random(seed)
    chosen = draw.sample(range(len(rows)), num)
    requests, now = [], 0.0
    for index, at in enumerate(chosen):
        requests.append(Request(index, now, rows[at].input_tokens, rows[at].output_tokens + 1))
        now += draw.expovariate(rate)
    return requests


def passes(requests: Sequence[Request], targets: Targets) -> bool:
    """See the module; a request without an end fails the run."""
    ttfts, tpots = [], []
    for request in requests:
        if request.first_s is None or request.finish_s is None:
            return False
        ttfts.append(request.first_s - request.arrival_s)
        tpots.append(request.tpot_s)
    return bool(np.percentile(ttfts, SHARE) < targets.ttft_s and np.percentile(tpots, SHARE) < targets.tpot_s)


def bisect(is_met: Callable[[float], bool], most: float = MOST_PER_GPU, width: float = WIDTH) -> float:
    """The highest rate that passed; 0: none did."""
    low, high = 0.0, most
    while high - low > width:
        middle = (low + high) / 2
        if is_met(middle):
            low = middle
        else:
            high = middle
    return low


def rate_per_gpu(
    serve: Serve,
    rows: Sequence[TraceRow],
    num_gpus: int,
    targets: Targets,
    seed: int,
    width: float = WIDTH,
    num_requests: int = NUM_REQUESTS,
) -> float:
    """Requests per second and GPU."""

    def is_met(per_gpu: float) -> bool:
        requests = requests_at(rows, per_gpu * num_gpus, num_requests, seed)
        serve(requests)
        return passes(requests, targets)

    return bisect(is_met, width=width)
