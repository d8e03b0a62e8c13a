"""`make bench`: what a served cluster does on this machine, as shares of the machine's own limits.

1. Measure the machine (memory read bandwidth).
2. For each topology (one prefill + one decode worker; colocated), run `baton serve` as a user would: time to
   ready, memory, time to first token of a short prompt alone, the hand-off gap of a 1,000-token prompt in
   decode steps, and closed-loop output tokens per second at several concurrencies.
3. Write one JSON file with the environment and print a table.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.client import StreamTimes, stream_completion
from bench.machine import describe_machine, proportional_memory_bytes

HOST = "127.0.0.1"
READY_TIMEOUT_S = 120.0
RESULTS = Path(__file__).parent / "results"


class ServedCluster:
    """One `baton serve` process, ended by SIGTERM."""

    def __init__(self, arguments: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        command = [sys.executable, "-m", "cluster.cli", "serve", "--port", str(self.port), *arguments]
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._wait_ready()
        self.start_s = time.perf_counter() - start

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=5) as response:
            return json.load(response)

    def _wait_ready(self) -> None:
        deadline = time.perf_counter() + READY_TIMEOUT_S
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"baton serve ended with status {self._process.returncode}")
            try:
                self.get("/ready")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # HTTP has no way to wait for a server that does not listen yet
        self.stop()
        raise SystemExit(f"baton serve was not ready within {READY_TIMEOUT_S:.0f} s")

    def memory(self) -> dict[str, dict[str, int]]:
        """Resident MiB by process: the router and every worker."""
        cluster = self.get("/cluster")
        pids = {worker["id"]: worker["pid"] for worker in cluster["workers"]}
        pids["router"] = cluster["router_pid"]
        result = {}
        for name, pid in pids.items():
            rss, pss = proportional_memory_bytes(pid)
            result[name] = {"rss_mib": rss >> 20, "pss_mib": pss >> 20}
        return result

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Random ordinary ids: no prefix is shared, no cache helps."""
    return [rng.randrange(1000, 40000) for _ in range(num_tokens)]


def body(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "timings": True,
    }


async def measure_latency(port: int, rng: random.Random) -> dict[str, Any]:
    short = [await stream_completion(HOST, port, body(prompt(rng, 20), 8)) for _ in range(9)]
    long = [await stream_completion(HOST, port, body(prompt(rng, 1000), 24)) for _ in range(5)]

    def handoff_steps(times: StreamTimes) -> float:
        return times.gaps_s[0] / statistics.median(times.gaps_s[1:])

    return {
        "ttft_ms_20_tokens_median": round(statistics.median(t.ttft_s for t in short) * 1e3, 1),
        "ttft_ms_1000_tokens_median": round(statistics.median(t.ttft_s for t in long) * 1e3, 1),
        "decode_step_ms_median": round(statistics.median(g for t in long for g in t.gaps_s[1:]) * 1e3, 2),
        "handoff_decode_steps_median": round(statistics.median(map(handoff_steps, long)), 2),
        "handoff_decode_steps_max": round(max(map(handoff_steps, long)), 2),
        "example_timings": long[-1].timings,
    }


async def measure_throughput(port: int, rng: random.Random, concurrency: int, num: int) -> dict[str, Any]:
    """Closed loop: `concurrency` clients, `num` requests of 256 tokens in, 128 out."""
    jobs = [body(prompt(rng, 256), 128) for _ in range(num)]
    done: list[StreamTimes] = []

    async def client() -> None:
        while jobs:
            done.append(await stream_completion(HOST, port, jobs.pop()))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s = time.perf_counter() - start
    gaps = sorted(gap for times in done for gap in times.gaps_s)
    return {
        "concurrency": concurrency,
        "requests": num,
        "output_tok_per_s": round(sum(t.usage["completion_tokens"] for t in done) / wall_s, 1),
        "ttft_ms_median": round(statistics.median(t.ttft_s for t in done) * 1e3, 1),
        "itl_ms_median": round(statistics.median(gaps) * 1e3, 2),
        "itl_ms_p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 2),
    }


def measure(arguments: list[str], concurrencies: list[int], seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    cluster = ServedCluster(arguments)
    try:
        result: dict[str, Any] = {"arguments": arguments, "start_to_ready_s": round(cluster.start_s, 2)}
        result["latency"] = asyncio.run(measure_latency(cluster.port, rng))
        result["throughput"] = [
            asyncio.run(measure_throughput(cluster.port, rng, c, max(3, 2 * c))) for c in concurrencies
        ]
        result["memory"] = cluster.memory()
        return result
    finally:
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weight-bytes", type=float, default=134.5e6 * 2, help="read per decode step")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    machine = describe_machine()
    common = ["--model", options.model]
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(machine),
        "seed": options.seed,
        "disaggregated": measure(
            [*common, "--prefill", "1", "--decode", "1"], options.concurrency, options.seed
        ),
        "colocated": measure([*common, "--prefill", "0", "--decode", "1"], options.concurrency, options.seed),
    }
    for name, threads in (("disaggregated", 1), ("colocated", machine.num_cores)):
        bandwidth = (
            machine.read_gb_per_s_one_thread if threads == 1 else machine.read_gb_per_s_all_threads
        ) * 1e9
        step_s = report[name]["latency"]["decode_step_ms_median"] / 1e3
        share = round(options.weight_bytes / step_s / bandwidth, 3)
        report[name]["decode_share_of_read_bandwidth"] = share
    output = options.output or RESULTS / f"baseline-{os.uname().machine}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    print(f"written: {output}")


if __name__ == "__main__":
    main()
