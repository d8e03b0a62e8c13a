"""`python -m bench.engine`: what a step of the engine costs, as a share of what this machine allows.

1. Load the model as a worker would, with a KV pool of its own (no cluster, no network).
2. For each case (`bench.engine_cases`: decode steps by batch and context, prefill chunks) run some steps
   through the runner and keep the fastest: other work on the machine only ever adds time. Decode steps are
   as a worker's mostly are: each goes on from the one before (`bench.engine_cases.Decoding`). Beside it
   stands its processor time per thread: less, where a helper slept or others held the cores.
3. Between the steps of every case measure the machine with the engine's own threads: bytes read from memory
   per second, and multiply-adds from registers per second: of the matrix unit, where products use it. The
   limit of a case is what its bytes or its multiply-adds alone would take at the best of these rates,
   whichever is longer (`bench.roofline`): what memory gives can change by half within seconds, so another
   second's rate is no limit. Weights and KV that stayed in the last cache since the step before were not read
   from memory: shares may be above 100 %. Where a matrix unit multiplies, torch's bf16 products are measured
   too, and prompts are held against their rate as well.

With `--profile` it tells instead where the time of a few steps goes (`bench.engine_profile`). What Python and
sampling add to a step is measured by `bench.step_overhead`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine_cases import (
    BLOCK_SIZE,
    CHUNK,
    LONG_PROMPT,
    Case,
    Decoding,
    Formats,
    Rates,
    decode,
    grid,
    make_plan,
    roofline,
    work,
)
from bench.engine_profile import mean_bytes, profile_case
from bench.weight_reads import WeightReads, weight_reads
from cluster.engine.backends import make_backend
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.kv.mapping import map_private
from cluster.sampling import SamplingParams
from kernels.cpu.backend import CpuBackend
from kernels.cpu.probe import MachineProbe
from kernels.ops import row_size
from kernels.quantization import Quantization

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
PROBES = 4  # of the machine during a case, beside the one before it
PROFILED = (decode(1, 256), decode(8, 256), decode(32, 256), Case(f"prefill {CHUNK}", 1, CHUNK, CHUNK))


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
    read_gb_per_s: float  # of the machine, meanwhile
    giga_multiply_adds_per_s: float
    gemm_giga_multiply_adds_per_s: float  # of torch's bf16 products, meanwhile; 0: no matrix unit multiplies
    share_of_gemm: float  # of a prompt's chunk: its multiply-adds per second over those; 0: not measured


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and its pool."""

    name: str
    spec: ModelSpec
    runner: ModelRunner
    num_blocks: int
    num_threads: int
    formats: Formats
    reads: WeightReads

    @classmethod
    def load(
        cls,
        model: str,
        formats: Formats,
        num_threads: int,
        pool_bytes: int,
        cache_dir: Path | None = None,
    ) -> Engine:
        backend = make_backend("cpu", num_threads, formats.quantization.value)
        if not (isinstance(backend, CpuBackend) and backend.is_native):
            raise SystemExit("the C++ kernels did not compile here: nothing to measure (see the log)")
        prepared = prepare_model(model, formats.dtype, backend, cache_dir=cache_dir)
        spec, dtype = prepared.spec, formats.pool_dtype
        block = (spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, row_size(spec.head_dim, dtype))
        num_blocks = max(pool_bytes // (torch.Size(block).numel() * dtype.itemsize), 160)
        num_bytes = num_blocks * torch.Size(block).numel() * dtype.itemsize
        pool = torch.frombuffer(map_private(num_bytes), dtype=dtype).view(num_blocks, *block)  # as a worker's
        pool.fill_(0.01)  # pages of its own: untouched memory is one page of zeros; int8 stays zeros
        runner = ModelRunner(prepared, pool, backend, min(LONG_PROMPT, spec.max_context_len))
        reads = weight_reads(prepared.directory, formats.weight_bytes)
        return cls(prepared.name, spec, runner, num_blocks, num_threads, formats, reads)

    def step(self, case: Case) -> Callable[[], object]:
        runner, vocab_size = self.runner, self.spec.vocab_size
        if case.num_queries == 1:
            return Decoding(runner, case, self.num_blocks, vocab_size, runner.max_model_len)
        return partial(runner.run, make_plan(case, self.num_blocks, vocab_size, ONE_TOKEN))


def fastest(
    run: Callable[[], object], probe: Callable[[], Rates], budget_s: float, at_least: int = 2
) -> tuple[float, float, Rates]:
    """(seconds, processor seconds of all threads) of the fastest of as many runs as fit the budget, after one
    that does not count; and the best of the rates that `probe` finds meanwhile."""
    run()
    fastest_run, spent_s, count = (float("inf"), float("inf")), 0.0, 0
    rates = [probe()]
    while count < at_least or (spent_s < budget_s and count < 200):
        start, start_processor = time.perf_counter(), time.process_time()
        run()
        elapsed_s = time.perf_counter() - start
        fastest_run = min(fastest_run, (elapsed_s, time.process_time() - start_processor))
        spent_s, count = spent_s + elapsed_s, count + 1
        if spent_s * PROBES >= budget_s * len(rates):
            rates.append(probe())
    best = Rates(*(max(column) for column in zip(*map(astuple, rates), strict=True)))
    return *fastest_run, best


def measure(engine: Engine, cases: list[Case], budget_s: float) -> dict[str, Any]:
    """`budget_s` per case; at least two steps each, however long they take."""
    probe = MachineProbe(engine.num_threads)
    steps = []
    for case in cases:
        wall_s, processor_s, rates = fastest(
            engine.step(case), lambda: measured_rates(probe, engine.formats), budget_s
        )
        measured = against_limit(
            case, wall_s, processor_s / engine.num_threads, engine.spec, engine.formats, rates, engine.reads
        )
        steps.append(asdict(measured))
    return describe(engine) | {"steps": steps}


def measured_rates(probe: MachineProbe, formats: Formats) -> Rates:
    bytes_per_s, multiply_adds_per_s = probe.measure()
    if not probe.has_unit or formats.unit_is_bf16 is None:
        return Rates(bytes_per_s, multiply_adds_per_s)
    unit_per_s = probe.tile_multiply_adds_per_s(formats.unit_is_bf16)
    return Rates(bytes_per_s, max(multiply_adds_per_s, unit_per_s), probe.gemm_multiply_adds_per_s())


def describe(engine: Engine) -> dict[str, Any]:
    return {
        "model": engine.name,
        "threads": engine.num_threads,
        "dtype": engine.formats.dtype.value,
        "quantization": engine.formats.quantization.value,
        "kv": str(engine.formats.pool_dtype).removeprefix("torch."),
        "load_average": round(os.getloadavg()[0], 1),
    }


def against_limit(
    case: Case,
    step_s: float,
    processor_s: float,
    spec: ModelSpec,
    formats: Formats,
    rates: Rates,
    reads: WeightReads,
) -> Measured:
    line = roofline(spec, formats, rates, mean_bytes(case, spec, reads))
    needed = work(case, line)
    memory_s, compute_s = needed.read_bytes / line.bytes_per_s, needed.flops / line.flops_per_s
    limit_s = max(memory_s, compute_s)
    gemm_per_s, per_s = rates.gemm_multiply_adds_per_s, needed.flops / 2 / step_s
    return Measured(
        name=case.name,
        step_ms=round(step_s * 1e3, 2),
        processor_ms=round(processor_s * 1e3, 2),
        tokens_per_s=round(case.num_tokens / step_s, 1),
        megabytes=round(needed.read_bytes / 1e6, 1),
        giga_multiply_adds=round(needed.flops / 2e9, 2),
        limit_ms=round(limit_s * 1e3, 2),
        bound="memory" if memory_s >= compute_s else "compute",
        share_of_limit=round(limit_s / step_s, 3),
        read_gb_per_s=round(rates.bytes_per_s / 1e9, 1),
        giga_multiply_adds_per_s=round(rates.multiply_adds_per_s / 1e9, 1),
        gemm_giga_multiply_adds_per_s=round(gemm_per_s / 1e9, 1),
        share_of_gemm=round(per_s / gemm_per_s, 3) if gemm_per_s and case.num_queries > 1 else 0.0,
    )


def headline(result: dict[str, Any]) -> str:
    return (
        f"{result['model']} {result['dtype']}, quantization {result['quantization']}, KV {result['kv']}, "
        f"{result['threads']} threads, load average {result['load_average']}"
    )


def table(result: dict[str, Any]) -> str:
    with_gemm = any(s["gemm_giga_multiply_adds_per_s"] for s in result["steps"])
    lines = [
        headline(result),
        f"{'step':<20}{'ms':>9}{'cpu ms':>9}{'tok/s':>9}{'MB':>7}{'GMAC':>8}{'GB/s':>7}{'GMAC/s':>8}"
        f"{'limit ms':>10}  {'bound':<8}{'achieved':>8}" + (f"{'GEMM':>8}{'of it':>7}" if with_gemm else ""),
    ]
    lines += [
        f"{s['name']:<20}{s['step_ms']:>9.1f}{s['processor_ms']:>9.1f}{s['tokens_per_s']:>9.1f}"
        f"{s['megabytes']:>7.0f}{s['giga_multiply_adds']:>8.2f}{s['read_gb_per_s']:>7.1f}"
        f"{s['giga_multiply_adds_per_s']:>8.1f}{s['limit_ms']:>10.1f}"
        f"  {s['bound']:<8}{s['share_of_limit']:>8.0%}" + gemm_columns(s)
        for s in result["steps"]
    ]
    return "\n".join(lines)


def gemm_columns(step: dict[str, Any]) -> str:
    """Of a prompt's chunk, where a matrix unit multiplies."""
    if not step["share_of_gemm"]:
        return ""
    return f"{step['gemm_giga_multiply_adds_per_s']:>8.0f}{step['share_of_gemm']:>7.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as `baton serve --model`")
    parser.add_argument("--dtype", default="bf16", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--quantization", default="none", choices=[kind.value for kind in Quantization])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pool-mib", type=int, default=1600, help="memory for keys and values")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case; the fastest step counts")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--only", default="", help='cases with this in their names, as "decode 1 x 256"')
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--output", type=Path, help="write the result too: JSON, of a profile its text")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    formats = Formats(
        Dtype(arguments.dtype), Quantization(arguments.quantization), arguments.kv_dtype == "int8"
    )
    engine = Engine.load(arguments.model, formats, arguments.threads, arguments.pool_mib * 2**20)
    if arguments.profile:
        parts = [
            profile_case(engine.runner, engine.spec, engine.reads, case, engine.step(case), arguments.seconds)
            for case in PROFILED
        ]
        text = written = "\n\n".join([headline(describe(engine)), *parts])
    else:
        cases = grid(engine.runner.max_model_len, arguments.quick)
        chosen = [case for case in cases if arguments.only in case.name]
        if not chosen:
            parser.error(f"no case has `{arguments.only}` in its name: {', '.join(c.name for c in cases)}")
        result = measure(engine, chosen, arguments.seconds)
        text, written = table(result), json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(written + "\n")


if __name__ == "__main__":
    main()
