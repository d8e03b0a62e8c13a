"""Runs made up for the report's tests: a server that takes requests in order, and the client's records."""

from __future__ import annotations

import random
from typing import Any

from bench.load.records import ClientReport, RequestRecord, RunRecord, Status

NUM_SLOTS = 6


def make_records(
    rate: float, num: int, seed: int, fail_every: int = 0, has_timings: bool = True
) -> list[RequestRecord]:
    """Poisson arrivals at a server with `NUM_SLOTS` slots; every `fail_every`-th request fails."""
    draw = random.Random(seed)
    free_at = [0.0] * NUM_SLOTS
    at, records = 0.0, []
    for index in range(num):
        at += draw.expovariate(rate)
        input_tokens, output_tokens = (
            int(draw.lognormvariate(5.5, 0.7)) + 1,
            int(draw.lognormvariate(3.2, 0.6)) + 1,
        )
        sent = at + draw.uniform(0.0001, 0.002)
        slot = free_at.index(min(free_at))
        start = max(sent, free_at[slot])
        prefill, transfer = 0.02 + input_tokens * 2e-4, 0.004 + input_tokens * 1e-5
        times, moment = [], start + prefill
        for i in range(output_tokens):
            times.append(moment)
            moment += (transfer if i == 0 else 0) + draw.gauss(0.03, 0.004)
        end = times[-1] + 0.0005
        free_at[slot] = end
        record = RequestRecord(
            index=index,
            scheduled_s=at,
            status=Status.OK,
            sent_s=sent,
            chunk_times_s=times,
            end_s=end,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            planned_input_tokens=input_tokens,
            planned_output_tokens=output_tokens,
            http_status=200,
            finish_reason="length",
        )
        if has_timings:
            record.timings = {
                "queue_ms": (start - sent) * 1e3,
                "prefill_ms": prefill * 1e3,
                "kv_transfer_ms": transfer * 1e3,
                "decode_ms": (times[-1] - times[0]) * 1e3 - transfer * 1e3,
                "prefill_worker": "p0",
            }
        if fail_every and index % fail_every == fail_every - 1:
            fail(record, index // fail_every)
        records.append(record)
    return records


def fail(record: RequestRecord, kind: int) -> None:
    """Turns an answered request into one that failed."""
    record.timings, record.finish_reason, record.output_tokens = {}, None, None
    match kind % 4:
        case 0:
            record.status, record.error = Status.TIMEOUT, "no answer within 30 s"
            record.chunk_times_s, record.http_status = [], None
        case 1:
            record.status, record.error = Status.REFUSED, "HTTP 503: no capacity"
            record.chunk_times_s, record.http_status, record.end_s = [], 503, record.scheduled_s + 0.01
        case 2:
            record.status, record.error = Status.INCOMPLETE, "the stream ended without finish_reason"
            record.chunk_times_s = record.chunk_times_s[: max(1, len(record.chunk_times_s) // 2)]
            record.end_s = record.chunk_times_s[-1] + 0.001
        case _:
            record.status, record.error = Status.SKIPPED, "an earlier turn failed"
            record.sent_s = record.end_s = record.http_status = None
            record.chunk_times_s = []


def make_run(rate: float, num: int, seed: int, fail_every: int = 0, has_timings: bool = True) -> RunRecord:
    records = make_records(rate, num, seed, fail_every, has_timings)
    wall_s = max((r.end_s for r in records if r.end_s is not None), default=0.0)
    return RunRecord(
        records=records,
        clients=[ClientReport(process=0, cpu_s=0.12 * wall_s, wall_s=wall_s)],
        start_unix_s=1_790_000_000.0,
        wall_s=wall_s,
        is_complete=True,
    )


def made_result(**changes: Any) -> dict[str, Any]:
    """A small result file's object, by hand."""
    result: dict[str, Any] = {
        "schema_version": 1,
        "date": "20261128-120000",
        "backend": "baton",
        "model_id": "demo",
        "valid": True,
        "invalid_reasons": [],
        "is_complete": True,
        "notes": [],
        "num_prompts": 100,
        "completed": 98,
        "failed": 2,
        "failures": {"timeout": 2},
        "arrival": {"kind": "poisson", "seed": 7, "rate": 2.0, "burstiness": 1.0, "closed_loop": None},
        "request_throughput": 1.9,
        "request_goodput": 1.8,
        "output_throughput": 60.0,
        "total_token_throughput": 600.0,
        "slos_ms": {"ttft": 200.0, "tpot": 50.0},
        "slo_attainment": 0.95,
        "slo_attainment_by_metric": {"ttft": 0.96, "tpot": 0.97},
        "send_lag_ms": {"p50": 0.1, "p99": 1.5},
        "client_cpu_pct": 12.0,
        "window": {"rule": "whole run", "start_s": 0.0, "end_s": 50.0, "is_whole_run": True},
    }
    for metric, scale in (("ttft", 100.0), ("tpot", 30.0), ("itl", 30.0), ("gap", 60.0), ("e2el", 1200.0)):
        for name, factor in (("median", 1.0), ("p50", 1.0), ("p90", 1.5), ("p99", 2.0)):
            result[f"{name}_{metric}_ms"] = scale * factor
    return {**result, **changes}
