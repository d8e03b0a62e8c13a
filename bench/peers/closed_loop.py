"""Closed loops of one shape, as every peer is offered them.

Prompts are token ids. Random ones are drawn from one seed, each run with a salt of its own, so that nothing
is found in a cache; those of text (`chats`) are given, the same for every peer. Answers go on past an
end-of-text token (`ignore_eos`), so that all peers compute the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.load.plan import Plan
from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import PlanSettings, Synthetic
from bench.load.runner import Measurement, RunSettings
from bench.peers.after_burst import AFTER_BURST, after_burst
from bench.peers.load import INPUT_TOKENS, OUTPUT_TOKENS
from bench.peers.measuring import measure_aware
from bench.peers.server import Running

WARMUP_OUTPUT_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
Prompts = Sequence[Sequence[int]]  # token ids, one list for each request


def warm_up(
    running: Running, concurrency: int, backend: str, salt: int, prompts: Prompts | None
) -> Measurement:
    """Short answers, several at once: what first use compiles or allocates is there afterwards."""
    settings = _settings(running, concurrency, concurrency, salt, WARMUP_OUTPUT_TOKENS)
    return _measure(running, settings, backend, prompts)


def measure_closed_loop(
    running: Running, concurrency: int, num_requests: int, backend: str, salt: int, prompts: Prompts | None
) -> Measurement:
    """`prompts` None: random ids. What came after the first burst is in the result (`AFTER_BURST`)."""
    settings = _settings(running, concurrency, num_requests, salt, OUTPUT_TOKENS)
    measurement = _measure(running, settings, backend, prompts)
    measurement.result[AFTER_BURST] = after_burst(measurement.run.records, concurrency)
    return measurement


def with_prompts(plan: Plan, prompts: Prompts) -> Plan:
    """The plan with these prompts in place of its own."""
    requests = tuple(
        msgspec.structs.replace(one, body=one.body | {"prompt": list(ids)}, input_tokens=len(ids))
        for one, ids in zip(plan.requests, prompts, strict=True)
    )
    lengths = [len(ids) for ids in prompts]
    own = {"kind": "given", "input": {"min": min(lengths), "max": max(lengths)}}
    workload = plan.workload | own | {"total_known_input_tokens": sum(lengths)}
    return msgspec.structs.replace(plan, requests=requests, workload=workload)


def _settings(
    running: Running, concurrency: int, num_requests: int, salt: int, output_tokens: int
) -> PlanSettings:
    return PlanSettings(
        model=running.info.model,
        arrival=arrivals.closed_loop(concurrency),
        workload=Synthetic(input=parse_lengths(str(INPUT_TOKENS)), output=parse_lengths(str(output_tokens))),
        num_requests=num_requests,
        max_model_len=running.info.max_model_len,
        salt=salt,
    )


def _measure(running: Running, settings: PlanSettings, backend: str, prompts: Prompts | None) -> Measurement:
    plan = build_plan(settings, None)
    if prompts is not None:
        plan = with_prompts(plan, prompts)
    return measure_aware(running, plan, settings, RunSettings(timeout_s=REQUEST_TIMEOUT_S), backend)
