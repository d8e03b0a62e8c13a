"""DistServe's simulated system for one prefill and one decode instance, restated: ours is held against it.

1. Prefill takes all prompts that wait, in order of arrival, in one step.
2. A prompt that is done waits for decode; moving its KV takes no time.
3. A decode step takes rows from the head of a queue while their keys fit into `most_keys`; then they go back
   to its tail. KV has no limit: with more keys than that, rows take turns.
4. An answer of n tokens takes n decode steps after the prefill, so it has n + 1 tokens in our count.

Source: github.com/LLMServe/DistServe, `simdistserve/base/worker.py` and `request.py`; step times as in
`bench.simulator.distserve`. 50,000 keys is a constant there, whatever the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bench.simulator.distserve import DistServeTimes
from bench.simulator.fleet.request import Request
from cluster.step_model import chunk_attention

MOST_KEYS = 50_000


def serve(
    requests: Sequence[Request], prefill: DistServeTimes, decode: DistServeTimes, most_keys: int = MOST_KEYS
) -> None:
    """Write `first_s` and `finish_s`; requests are in order of arrival, their answers 2 tokens or more."""
    _prefill(requests, prefill)
    _decode(sorted(requests, key=_first_s), decode, most_keys)


def _first_s(request: Request) -> float:
    assert request.first_s is not None
    return request.first_s


def _prefill(requests: Sequence[Request], times: DistServeTimes) -> None:
    now, begun = 0.0, 0
    while begun < len(requests):
        now = max(now, requests[begun].arrival_s)
        batch = []
        while begun < len(requests) and requests[begun].arrival_s <= now:
            batch.append(requests[begun])
            begun += 1
        pairs = sum(chunk_attention(0, request.num_prompt) for request in batch)
        now += times.step_s(0, 0, sum(request.num_prompt for request in batch), pairs)
        for request in batch:
            request.first_s = now


def _decode(requests: Sequence[Request], times: DistServeTimes, most_keys: int) -> None:
    now, joined = 0.0, 0
    queue: deque[Request] = deque()
    while queue or joined < len(requests):
        if not queue:
            now = max(now, _first_s(requests[joined]))
        joined = _join(queue, requests, joined, now)
        rows: list[Request] = []
        context = 0
        while queue and (not rows or context + _keys(queue[0]) <= most_keys):
            context += _keys(queue[0])
            rows.append(queue.popleft())
        now += times.step_s(len(rows), context, 0, 0.0)
        joined = _join(queue, requests, joined, now)
        for request in rows:
            request.num_generated += 1
            if request.num_generated == request.num_output - 1:
                request.finish_s = now
            else:
                queue.append(request)


def _join(queue: deque[Request], requests: Sequence[Request], joined: int, now: float) -> int:
    while joined < len(requests) and _first_s(requests[joined]) <= now:
        queue.append(requests[joined])
        joined += 1
    return joined


def _keys(request: Request) -> int:
    return request.num_prompt + request.num_generated + 1
