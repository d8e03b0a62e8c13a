"""How many streamed tokens per second one client process on one core reads, and how late it sends meanwhile.

`python -m bench.load.capacity`: a mock server on one core, one client process on another. Streams of one
token per event of about 250 bytes, each event a write of its own, at rising rates until one is not
sustained: the client got less than 97 % of the offered tokens, or its send lag's p99 reached 5 ms. Prints
JSON.

The mock has one core, too: `server_cpu` near 1 says that a row shows the mock's limit and not the client's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import orjson

from bench.load.mock_process import running_mock
from bench.load.mock_script import Script
from bench.load.mock_server import MockSettings
from bench.load.plan import Arrival, Plan, PlannedRequest
from bench.load.pool import run_plan
from bench.load.records import RunRecord, Status
from bench.load.target import Target

MAX_LAG_S = 0.005
MIN_ACHIEVED = 0.97
TOKENS_PER_REQUEST = 200
ITL_S = 0.010
RATES = (5_000, 10_000, 20_000, 25_000, 30_000, 40_000, 50_000)
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    offered_tokens_per_s: float
    streamed_tokens_per_s: float  # read within the steady part of the run
    num_streams: int  # at once, in the steady part
    num_requests: int
    num_failed: int
    client_cpu: float  # share of one core
    server_cpu: float
    send_lag_p50_ms: float
    send_lag_p99_ms: float
    is_sustained: bool


def flood_plan(tokens_per_s: float, duration_s: float) -> Plan:
    """Requests at a constant rate whose streams add up to `tokens_per_s` after the first stream's time."""
    rate = tokens_per_s / TOKENS_PER_REQUEST
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": TOKENS_PER_REQUEST}
    requests = tuple(
        PlannedRequest(index=index, scheduled_s=index / rate, body=body, output_tokens=TOKENS_PER_REQUEST)
        for index in range(round(duration_s * rate))
    )
    shared = {"model": "mock", "stream": True, "stream_options": {"include_usage": True}}
    arrival = Arrival(kind="constant", seed=0, rate=rate)
    return Plan(
        endpoint="/v1/chat/completions", shared_body=shared, requests=requests, arrival=arrival, workload={}
    )


def measure(target: Target, server_pid: int, tokens_per_s: float, duration_s: float, core: int | None) -> Row:
    server_before_s = process_cpu_s(server_pid)
    run = run_plan(
        flood_plan(tokens_per_s, duration_s), target, timeout_s=60.0, cores=() if core is None else (core,)
    )
    server_cpu_s = process_cpu_s(server_pid) - server_before_s
    return make_row(run, tokens_per_s, duration_s, server_cpu_s)


def make_row(run: RunRecord, tokens_per_s: float, duration_s: float, server_cpu_s: float) -> Row:
    """The steady part: from the end of the first stream to the last arrival."""
    start_s = TOKENS_PER_REQUEST * ITL_S
    inside = [
        time_s for record in run.records for time_s in record.chunk_times_s if start_s <= time_s < duration_s
    ]
    streamed = len(inside) / (duration_s - start_s)
    lags_s = sorted(record.sent_s - record.scheduled_s for record in run.records if record.sent_s is not None)
    p99_s = lags_s[min(len(lags_s) - 1, int(len(lags_s) * 0.99))]
    num_failed = sum(record.status is not Status.OK for record in run.records)
    [client] = run.clients
    return Row(
        offered_tokens_per_s=tokens_per_s,
        streamed_tokens_per_s=round(streamed),
        num_streams=round(tokens_per_s * ITL_S),
        num_requests=len(run.records),
        num_failed=num_failed,
        client_cpu=round(client.cpu_s / client.wall_s, 3),
        server_cpu=round(server_cpu_s / client.wall_s, 3),
        send_lag_p50_ms=round(statistics.median(lags_s) * 1000, 3),
        send_lag_p99_ms=round(p99_s * 1000, 3),
        is_sustained=num_failed == 0 and streamed >= MIN_ACHIEVED * tokens_per_s and p99_s < MAX_LAG_S,
    )


def process_cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def capacity(
    rates: Sequence[float], duration_s: float, server_core: int | None, client_core: int | None
) -> list[Row]:
    """Rows at rising rates; the last one is the first that was not sustained, if there is one."""
    settings = MockSettings(script=Script(itl_s=ITL_S), keeps_truth=False)
    rows: list[Row] = []
    with running_mock(settings, core=server_core) as mock:
        for rate in rates:
            rows.append(measure(mock.target, mock.pid, rate, duration_s, client_core))
            if not rows[-1].is_sustained:
                break
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load.capacity", description="client capacity on one core"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="offered tokens per second, rising"
    )
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of arrivals per rate")
    options = parser.parse_args(arguments)
    cores: list[int | None] = [*sorted(os.sched_getaffinity(0))]
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    rows = capacity(options.rates, options.duration, server_core, client_core)
    best = max((row.streamed_tokens_per_s for row in rows if row.is_sustained), default=0.0)
    report = {
        "sustained_tokens_per_s": best,
        "rows": rows,
        "cores": {"server": server_core, "client": client_core},
    }
    print(orjson.dumps(msgspec.to_builtins(report), option=orjson.OPT_INDENT_2).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
