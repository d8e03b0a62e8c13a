"""`python -m bench.engine`: what a step of the engine costs, as a share of what this machine allows.

1. Load the model as a worker would, with a KV pool of its own (no cluster, no network).
2. For each case (decode steps of a batch at a context, prefill chunks) run some steps through the runner and
   keep the fastest: other work on the machine only ever adds time. Beside it stands the least processor time
   per thread: where the two differ, others held the cores.
3. Around every case measure the machine with the engine's own threads: bytes read from memory per second, and
   multiply-adds from registers per second. The limit of a case is what its bytes or its multiply-adds alone
   would take at the best rates of the run, whichever is longer (`bench.roofline`).

4. Time what Python adds to a step: packing the batch, and choosing tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.roofline import ModelShape, Roofline, Work
from cluster.engine.backends import make_backend
from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.packed_batch import pack
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.engine.sampler import sample
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from kernels.cpu.backend import CpuBackend
from kernels.cpu.probe import MachineProbe
from kernels.quantization import Quantization

BLOCK_SIZE = 64
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
DRAWN = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95, seed=1)
BATCH_SIZES, CONTEXTS = (1, 8, 32, 64), (256, 1024)
CHUNK, LONG_PROMPT = 512, 8192


@dataclass(frozen=True, slots=True)
class Case:
    """`num_seqs` sequences, each bringing `num_queries` tokens that end at `context`."""

    name: str
    num_seqs: int
    num_queries: int
    context: int

    def keys_seen(self) -> int:
        """By all tokens: query i of n sees context - n + i + 1."""
        first = self.context - self.num_queries + 1
        return self.num_seqs * self.num_queries * (first + self.context) // 2


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    step_ms: float
    processor_ms: float  # per thread
    tokens_per_s: float
    megabytes: float
    giga_multiply_adds: float
    limit_ms: float
    bound: str  # "memory" or "compute"
    share_of_limit: float


@dataclass(frozen=True, slots=True)
class Rates:
    bytes_per_s: float
    multiply_adds_per_s: float


def roofline(spec: ModelSpec, dtype: Dtype, rates: Rates, quantization: str = "none") -> Roofline:
    """A multiply-add counts as two operations there. The limit of arithmetic stays that of fp32 multiply-adds
    where weights are int8: a share above 100 % says what integers gain."""
    size = TORCH_DTYPES[dtype].itemsize
    weight_size = size if quantization == "none" else 1
    shape = ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
    )
    return Roofline(shape, weight_size, size, rates.bytes_per_s, 2 * rates.multiply_adds_per_s)


def work(case: Case, line: Roofline) -> Work:
    """What the case cannot do without."""
    num_tokens = case.num_seqs * case.num_queries
    return line.step(num_tokens, case.num_seqs, case.keys_seen(), case.num_seqs * case.context)


def make_plan(case: Case, num_blocks: int, params: SamplingParams) -> StepPlan:
    """Sequences whose blocks are all over the pool; where there are too few they are shared."""
    per_seq = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for seq in range(case.num_seqs):
        tokens = [(7919 * seq + 31 * i) % 40000 + 5 for i in range(case.num_queries)]
        blocks = [BlockId(order[(seq * per_seq + b) % num_blocks]) for b in range(per_seq)]
        rows.append(
            Row(
                request=RequestId(str(seq)),
                attempt=Attempt(1),
                token_ids=tokens,
                start=case.context - case.num_queries,
                block_ids=blocks,
                sample=SampleSpec(params, (1,), ()),
            )
        )
    return StepPlan(rows=tuple(rows))


def fastest(run: Callable[[], Any], budget_s: float, at_least: int = 3) -> tuple[float, float]:
    """(seconds, processor seconds of all threads), each the least of as many runs as fit the budget, after
    one that does not count."""
    run()
    wall_s, processor_s, spent_s, count = float("inf"), float("inf"), 0.0, 0
    while count < at_least or (spent_s < budget_s and count < 200):
        start, start_processor = time.perf_counter(), time.process_time()
        run()
        elapsed_s = time.perf_counter() - start
        wall_s, processor_s = min(wall_s, elapsed_s), min(processor_s, time.process_time() - start_processor)
        spent_s, count = spent_s + elapsed_s, count + 1
    return wall_s, processor_s


def python_costs_us(spec: ModelSpec, num_blocks: int) -> dict[str, float]:
    """Microseconds per step of 64 decode rows at a context of 1,024."""
    plan = make_plan(Case("", 64, 1, 1024), num_blocks, GREEDY)
    logits = torch.randn(64, spec.vocab_size, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(dim=-1)
    positions = [1024] * 64
    costs = {
        "pack": lambda: pack(plan.rows, BLOCK_SIZE, 8192, torch.device("cpu")),
        "choose, greedy": lambda: sample(
            logits, [row.sample for row in plan.rows if row.sample], positions, best.tolist()
        ),
        "choose, top-k 50 top-p 0.95": lambda: sample(
            logits, [SampleSpec(DRAWN, (1,), ())] * 64, positions, best.tolist()
        ),
    }
    return {name: round(fastest(run, 0.3)[0] * 1e6, 1) for name, run in costs.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    threads, dtype = arguments.threads, Dtype(arguments.dtype)
    backend = make_backend("cpu", threads, arguments.quantization)
    if not (isinstance(backend, CpuBackend) and backend.is_native):
        raise SystemExit("the C++ kernels did not compile here: nothing to measure (see the log)")
    prepared = prepare_model(arguments.model, dtype, backend)
    spec = prepared.spec
    num_blocks = max(arguments.pool_mib * 2**20 // spec.kv_block_bytes(BLOCK_SIZE, dtype), 160)
    pool = torch.empty(
        num_blocks,
        spec.num_layers,
        2,
        BLOCK_SIZE,
        spec.num_kv_heads,
        spec.head_dim,
        dtype=TORCH_DTYPES[dtype],
    )
    pool.fill_(0.01)
    max_len = min(LONG_PROMPT, spec.max_context_len)
    runner = ModelRunner(prepared, pool, backend, max_len)
    cases = [Case(f"decode {b} x {c}", b, 1, c) for c in CONTEXTS for b in BATCH_SIZES]
    cases += [
        Case(f"prefill {min(CHUNK, max_len)} at {end}", 1, min(CHUNK, max_len), end)
        for end in sorted({min(CHUNK, max_len), min(2048, max_len), max_len})
    ]
    probe = MachineProbe(threads)
    timed, rates = [], [Rates(*probe.measure())]
    for case in cases:
        plan = make_plan(case, num_blocks, GREEDY)
        wall_s, processor_s = fastest(partial(runner.run, plan), arguments.seconds, at_least=2)
        timed.append((case, wall_s, processor_s / threads))
        rates.append(Rates(*probe.measure()))
    best = Rates(max(r.bytes_per_s for r in rates), max(r.multiply_adds_per_s for r in rates))
    return {
        "threads": threads,
        "dtype": dtype.value,
        "quantization": arguments.quantization,
        "model": prepared.name,
        "read_gb_per_s": round(best.bytes_per_s / 1e9, 1),
        "giga_multiply_adds_per_s": round(best.multiply_adds_per_s / 1e9, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "steps": [asdict(against_limit(*step, spec, dtype, best, arguments.quantization)) for step in timed],
        "python_us_at_64": python_costs_us(spec, num_blocks),
    }


def against_limit(
    case: Case,
    step_s: float,
    processor_s: float,
    spec: ModelSpec,
    dtype: Dtype,
    rates: Rates,
    quantization: str = "none",
) -> Measured:
    line = roofline(spec, dtype, rates, quantization)
    needed = work(case, line)
    memory_s, compute_s = needed.read_bytes / line.bytes_per_s, needed.flops / line.flops_per_s
    limit_s = max(memory_s, compute_s)
    return Measured(
        name=case.name,
        step_ms=round(step_s * 1e3, 2),
        processor_ms=round(processor_s * 1e3, 2),
        tokens_per_s=round(case.num_seqs * case.num_queries / step_s, 1),
        megabytes=round(needed.read_bytes / 1e6, 1),
        giga_multiply_adds=round(needed.flops / 2e9, 2),
        limit_ms=round(limit_s * 1e3, 2),
        bound="memory" if memory_s >= compute_s else "compute",
        share_of_limit=round(limit_s / step_s, 3),
    )


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']} {result['dtype']}, quantization {result['quantization']}, "
        f"{result['threads']} threads: "
        f"reads {result['read_gb_per_s']} GB/s, {result['giga_multiply_adds_per_s']} G multiply-adds/s "
        f"(load average {result['load_average']})",
        f"{'step':<20}{'ms':>9}{'cpu ms':>9}{'tok/s':>9}{'MB':>7}{'GMAC':>8}{'limit ms':>10}"
        f"  {'bound':<8}{'achieved':>8}",
    ]
    lines += [
        f"{s['name']:<20}{s['step_ms']:>9.1f}{s['processor_ms']:>9.1f}{s['tokens_per_s']:>9.1f}"
        f"{s['megabytes']:>7.0f}{s['giga_multiply_adds']:>8.2f}{s['limit_ms']:>10.1f}"
        f"  {s['bound']:<8}{s['share_of_limit']:>8.0%}"
        for s in result["steps"]
    ]
    lines += [f"python at batch 64: {name} {us:.0f} µs" for name, us in result["python_us_at_64"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as `baton serve --model`")
    parser.add_argument("--dtype", default="bf16", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--quantization", default="none", choices=[kind.value for kind in Quantization])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pool-mib", type=int, default=1600, help="memory for keys and values")
    parser.add_argument("--seconds", type=float, default=1.5, help="per case; the fastest step counts")
    parser.add_argument("--output", type=Path, help="write the result as JSON too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    print(table(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
