"""Records and runs for the tests of the load test's figures."""

from collections.abc import Sequence

from bench.load.plan import Arrival, Plan, PlannedRequest
from bench.load.records import ClientReport, RequestRecord, RunRecord, Status


def answer(
    scheduled_s: float,
    chunks_s: Sequence[float],
    *,
    index: int = 0,
    lag_s: float = 0.0,
    end_s: float | None = None,
    status: Status = Status.OK,
    tokens: int | None = -1,
    input_tokens: int | None = 10,
    chunk_tokens: Sequence[int] = (),
    error: str | None = None,
    http_status: int | None = 200,
) -> RequestRecord:
    """A request that was sent; its chunks are moments since the run's start. Usage: one token per chunk."""
    last_s = chunks_s[-1] if chunks_s else scheduled_s + lag_s
    return RequestRecord(
        index=index,
        scheduled_s=scheduled_s,
        status=status,
        sent_s=scheduled_s + lag_s,
        chunk_times_s=list(chunks_s),
        chunk_tokens=list(chunk_tokens),
        end_s=last_s if end_s is None else end_s,
        input_tokens=input_tokens,
        output_tokens=len(chunks_s) if tokens == -1 else tokens,
        planned_input_tokens=input_tokens,
        finish_reason="length" if status is Status.OK else None,
        http_status=http_status,
        error=error,
    )


def skipped(scheduled_s: float, index: int = 0) -> RequestRecord:
    return RequestRecord(
        index=index, scheduled_s=scheduled_s, status=Status.SKIPPED, error="An earlier turn failed."
    )


def run_of(
    records: Sequence[RequestRecord],
    *,
    cpu_s: float = 0.1,
    is_complete: bool = True,
    notes: Sequence[str] = (),
) -> RunRecord:
    for index, record in enumerate(records):
        record.index = index
    ends = [record.end_s for record in records if record.end_s is not None]
    wall_s = max(ends, default=0.0)
    return RunRecord(
        records=list(records),
        clients=[ClientReport(process=0, cpu_s=cpu_s * wall_s, wall_s=wall_s)],
        start_unix_s=1_796_000_000.0,
        wall_s=wall_s,
        is_complete=is_complete,
        notes=list(notes),
    )


def steady_run(num: int = 100, rate: float = 10.0, ttft_s: float = 0.1, tpot_s: float = 0.02) -> RunRecord:
    """Evenly spaced requests, each answered with ten tokens, one per chunk."""
    records = []
    for i in range(num):
        at_s = i / rate
        records.append(answer(at_s, [at_s + ttft_s + k * tpot_s for k in range(10)]))
    return run_of(records)


def plan_of(run: RunRecord, arrival: Arrival | None = None) -> Plan:
    return Plan(
        endpoint="/v1/completions",
        shared_body={"model": "m", "stream": True},
        requests=tuple(
            PlannedRequest(index=record.index, scheduled_s=record.scheduled_s, body={"prompt": [1, 2]})
            for record in run.records
        ),
        arrival=arrival or Arrival(kind="poisson", seed=7, rate=10.0),
        workload={"kind": "fixed", "input_tokens": 10, "output_tokens": 10},
    )
