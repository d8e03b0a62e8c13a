"""`make bench`: what a served cluster does on this machine, as shares of the machine's own limits.

1. Measure the machine: memory read bandwidth, matrix products.
2. For each topology (one prefill + one decode worker; colocated), run `baton serve` as a user would: time to
   ready, memory, time to first token of a short prompt alone, the hand-off gap of a 1,000-token prompt in
   decode steps, and closed-loop output tokens per second at several concurrencies.
3. Hold each figure against the roofline of all cores, which workers lend one another. Nobody guesses
   (`--speculation off`): answers to random ids repeat themselves, and one reading of the weights would give
   several tokens.
4. Write one JSON file with the environment and print it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import statistics
from pathlib import Path
from typing import Any

from bench.load.client.target import Target, parse_target, probe
from bench.load.plans.arrivals import closed_loop
from bench.load.plans.lengths import Fixed
from bench.load.plans.settings import PlanSettings, Synthetic
from bench.load.records import RequestRecord
from bench.load.runner import Measurement, RunSettings, measure
from bench.machine import Machine, describe_machine
from bench.roofline import ModelShape, Roofline
from bench.served import ServedCluster
from cluster.engine.gguf_codes import kept_bits
from cluster.engine.model_source import resolve_model

RESULTS = Path(__file__).parent / "results"
INPUT_TOKENS, OUTPUT_TOKENS = 256, 128
SMOLLM2_135M = ModelShape(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    intermediate_size=1536,
    vocab_size=49152,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """Offers closed loops to one server; no two share a prompt."""

    target: Target
    model: str
    seed: int

    def offer(
        self, concurrency: int, num_requests: int, input_tokens: int, output_tokens: int
    ) -> Measurement:
        settings = PlanSettings(
            model=self.model,
            arrival=closed_loop(concurrency),
            workload=Synthetic(input=Fixed(input_tokens), output=Fixed(output_tokens)),
            num_requests=num_requests,
            seed=self.seed,
            salt=concurrency * 10_000 + input_tokens,
            extra_body={"timings": True},
        )
        measured = measure(settings, RunSettings(), self.target, {}, None)
        if measured.summary.failed:
            raise SystemExit(f"requests failed: {measured.result['error_counts']}")
        for reason in measured.result["invalid_reasons"]:
            print(f"concurrency {concurrency}, {input_tokens} tokens in: {reason}")
        return measured


def gaps_s(record: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(record.chunk_times_s)]


def handoff_steps(record: RequestRecord) -> float:
    """The gap between token 0 and token 1, in ordinary decode steps of the same request."""
    gaps = gaps_s(record)
    return gaps[0] / statistics.median(gaps[1:])


def measure_latency(client: Client, line: Roofline) -> dict[str, Any]:
    short = client.offer(1, 9, 20, 8)
    long = client.offer(1, 5, 1000, 24)
    records = long.run.records
    step_s = statistics.median(gap for record in records for gap in gaps_s(record)[1:])
    ttft_s = long.result["median_ttft_ms"] / 1e3
    return {
        "ttft_ms_20_tokens_median": round(short.result["median_ttft_ms"], 1),
        "ttft_ms_1000_tokens_median": round(ttft_s * 1e3, 1),
        "prefill_share_of_limit": round(line.least_prefill_s(1000) / ttft_s, 3),
        "decode_step_ms_median": round(step_s * 1e3, 2),
        "decode_share_of_limit": round(line.least_decode_s(1, 1012) / step_s, 3),
        "handoff_decode_steps_median": round(statistics.median(map(handoff_steps, records)), 2),
        "handoff_decode_steps_max": round(max(map(handoff_steps, records)), 2),
        "example_timings": records[-1].timings,
    }


def measure_throughput(client: Client, line: Roofline, concurrency: int) -> dict[str, Any]:
    result = client.offer(concurrency, max(3, 2 * concurrency), INPUT_TOKENS, OUTPUT_TOKENS).result
    limit = line.most_output_tokens_per_s(concurrency, INPUT_TOKENS, OUTPUT_TOKENS)
    return {
        "concurrency": concurrency,
        "requests": result["completed"],
        "output_tok_per_s": round(result["output_throughput"], 1),
        "share_of_limit": round(result["output_throughput"] / limit, 3),
        "ttft_ms_median": round(result["median_ttft_ms"], 1),
        "itl_ms_median": round(result["median_itl_ms"], 2),
        "itl_ms_p99": round(result["p99_itl_ms"], 2),
    }


def weight_bytes(machine: Machine) -> float:
    """Per element of the demo model, as a step of few rows reads it: its file's codes where they are kept."""
    bits = kept_bits(resolve_model("demo").path) if "avx512_bf16" in machine.isa else None
    return 2.0 if bits is None else bits / 8


def roofline(machine: Machine, weight_bytes_per_element: float) -> Roofline:
    """Of all cores."""
    return Roofline(
        shape=SMOLLM2_135M,
        weight_bytes_per_element=weight_bytes_per_element,
        kv_bytes_per_element=2,
        bytes_per_s=1e9 * machine.read_gb_per_s_all_threads,
        flops_per_s=1e9 * machine.gemm_gflop_per_s_all_threads,
    )


def measure_topology(
    line: Roofline, arguments: list[str], concurrencies: list[int], seed: int
) -> dict[str, Any]:
    arguments = [*arguments, "--speculation", "off"]
    with ServedCluster(arguments) as cluster:
        target = parse_target(cluster.url)
        client = Client(target, probe(target).model, seed)
        return {
            "arguments": arguments,
            "start_to_ready_s": round(cluster.start_s, 2),
            "latency": measure_latency(client, line),
            "throughput": [measure_throughput(client, line, one) for one in concurrencies],
            "memory": cluster.memory_mib(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / f"baseline-{os.uname().machine}.json")
    options = parser.parse_args()
    machine = describe_machine()
    read_bytes = weight_bytes(machine)
    line = roofline(machine, read_bytes)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(machine),
        "weight_bytes_per_element": round(read_bytes, 3),
        "seed": options.seed,
    }
    for name, arguments in (
        ("disaggregated", ["--prefill", "1", "--decode", "1"]),
        ("colocated", ["--prefill", "0", "--decode", "1"]),
    ):
        report[name] = measure_topology(line, arguments, options.concurrency, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
