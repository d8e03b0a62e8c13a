"""Part (e), the engine: decode steps and prefill of models of named shapes, end to end through the runner.

A step is timed by the wall from the plan to the tokens on the host: packing, the forward pass, sampling.
Beside it stands what the device alone needs for the forward pass, replayed from a graph: what lies between
the two is launches, sampling and the host. Decode steps are timed once more as workers run them
(`bench.gpu_check.served`); in exact mode their tokens must be those of plain steps. The roofline is that of
`bench.roofline` with this run's ceilings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.engine_cases import BLOCK_SIZE as CASE_BLOCK_SIZE
from bench.engine_cases import Case, Formats, Rates, decode, make_plan, roofline, work
from bench.gpu_check.report import Line
from bench.gpu_check.served import GREEDY, decode_on, graph_runner
from bench.gpu_check.timing import Ceilings, Clock
from bench.gpu_check.worlds import make_pool, make_runner, random_weights, spec_of
from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import Mode


@dataclass(frozen=True, slots=True)
class Sizes:
    models: tuple[str, ...]
    cases: tuple[Case, ...]
    served_steps: int = 3  # of each case of decode rows


REAL = Sizes(
    models=("Llama-3-8B", "Qwen3-0.6B", "SmolLM2-135M"),
    cases=(
        decode(1, 1024),
        decode(16, 1024),
        decode(64, 1024),
        decode(1, 8192),
        Case("prefill 512", 1, 512, 512),
        Case("prefill 2048", 1, 2048, 2048),
        Case("prefill 512 at 8192", 1, 512, 8192),
    ),
    served_steps=32,
)
TINY = Sizes(
    models=("tiny, group 4", "tiny, group 3, norms of heads"),
    cases=(decode(2, 9), Case("prefill 6", 1, 6, 6)),
)


def run(
    backends: dict[str, TritonBackend], clock: Clock, ceilings: Ceilings, dtype: Dtype, sizes: Sizes
) -> Iterator[Line]:
    longest = max(case.context for case in sizes.cases)
    num_blocks = max(case.num_seqs * -(-case.context // CASE_BLOCK_SIZE) for case in sizes.cases)
    first = next(iter(backends.values()))
    for model in sizes.models:
        spec = spec_of(model)
        with torch.inference_mode():
            weights = random_weights(spec, TORCH_DTYPES[dtype], first)
        pool = make_pool(model, dtype, first.device, num_blocks + 1, CASE_BLOCK_SIZE)  # the last: padding
        runners = {
            mode: make_runner(model, weights, dtype, backend, pool, longest)
            for mode, backend in backends.items()
        }
        row_counts = sorted({case.num_seqs for case in sizes.cases if case.num_queries == 1})
        served = {
            mode: graph_runner(runner, pool, backends[mode], row_counts)[0]
            for mode, runner in runners.items()
        }
        rates = Rates(ceilings.copy_bytes_per_s, ceilings.product_flops_per_s / 2)
        line = roofline(spec, Formats(dtype), rates, Formats(dtype).weight_bytes)
        for case in sizes.cases:
            least_s = work(case, line).least_seconds(line.bytes_per_s, line.flops_per_s)
            cells: dict[str, object] = {"roofline ms": round(least_s * 1e3, 3)}
            steps: dict[str, float] = {}
            holds: bool | None = None
            for mode, runner in runners.items():
                steps[mode], device_s = _measure(runner, pool, case, spec.vocab_size, clock)
                cells[f"{mode} ms"] = round(steps[mode] * 1e3, 3)
                cells[f"{mode} device ms"] = round(device_s * 1e3, 3)
                if case.num_queries == 1:
                    count = min(sizes.served_steps, case.context)
                    plain = decode_on(runner, case, num_blocks, spec.vocab_size, count)
                    by_graphs = decode_on(served[mode], case, num_blocks, spec.vocab_size, count)
                    steps[mode] = by_graphs.step_s
                    cells[f"{mode} served ms"] = round(by_graphs.step_s * 1e3, 3)
                    cells[f"{mode} gap us"] = round((by_graphs.step_s - device_s) * 1e6)
                    if mode == Mode.EXACT:
                        holds = by_graphs.tokens == plain.tokens
                cells[f"{mode} of roofline"] = f"{least_s / steps[mode]:.0%}"
            best = min(steps.values())
            cells["tok/s"] = round(case.num_tokens / best)
            if {"exact", "fast"} <= steps.keys():
                cells["fast/exact"] = round(steps["fast"] / steps["exact"], 3)
            yield Line(f"{model} {case.name}", cells, holds=holds)
        del weights, runners, served, pool
        if first.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    runner: ModelRunner, pool: Tensor, case: Case, vocab_size: int, clock: Clock
) -> tuple[float, float]:
    """(seconds by the wall of a whole step, seconds of the device for the forward pass)."""
    plan = make_plan(case, pool.shape[0] - 1, vocab_size, GREEDY)
    wall_s = clock.wall_seconds(lambda: runner.run(plan))
    batch = pack(plan.rows, CASE_BLOCK_SIZE, runner.max_model_len, pool.device)
    device_s = clock.replay_seconds(lambda: runner.decoder.forward(batch, pool))
    return wall_s, device_s
