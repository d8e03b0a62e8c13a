"""Part (e), the engine: decode steps and prefill of models of named shapes, end to end through the runner.

A step is timed by the wall from the plan to the tokens on the host: packing, the forward pass, sampling.
Beside it stands what the device alone needs for the forward pass, replayed from a graph: what lies between
the two is launches, sampling and the host. Decode steps are timed once more as workers run them
(`bench.gpu_check.served`); in exact mode their tokens must be those of plain steps. Their gap is what they
take beyond the device's time for the same graph. The roofline is that of `bench.roofline` with this run's
ceilings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.engine_cases import BLOCK_SIZE as CASE_BLOCK_SIZE
from bench.engine_cases import Case, Formats, Rates, decode, make_plan, roofline, work
from bench.gpu_check.goals import decode_step
from bench.gpu_check.report import Line
from bench.gpu_check.served import GREEDY, Served, decode_on, graph_runner
from bench.gpu_check.timing import Ceilings, Clock
from bench.gpu_check.worlds import make_pool, make_runner, random_weights, spec_of
from cluster.engine.batch import Runner
from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import TORCH_DTYPES
from cluster.errors import first_line
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
    """A model for which the device has no room is told, and the next one begins."""
    for model in sizes.models:
        try:
            yield from _Model(model, backends, clock, ceilings, dtype, sizes).run()
        except torch.OutOfMemoryError as error:
            yield Line(f"{model}: no room on this device", {"note": first_line(error)})
        if clock.is_gpu:
            torch.cuda.empty_cache()


class _Model:
    """One shape with random weights, in every mode."""

    def __init__(
        self, name: str, backends: dict[str, TritonBackend], clock: Clock, ceilings: Ceilings, dtype: Dtype,
        sizes: Sizes,
    ) -> None:  # fmt: skip
        self._name, self._spec, self._clock, self._sizes = name, spec_of(name), clock, sizes
        longest = max(case.context for case in sizes.cases)
        self._num_blocks = max(case.num_seqs * -(-case.context // CASE_BLOCK_SIZE) for case in sizes.cases)
        first = next(iter(backends.values()))
        with torch.inference_mode():
            weights = random_weights(self._spec, TORCH_DTYPES[dtype], first)
        # the last block: padding
        self._pool = make_pool(name, dtype, first.device, self._num_blocks + 1, CASE_BLOCK_SIZE)
        self._runners = {
            mode: make_runner(name, weights, dtype, backend, self._pool, longest)
            for mode, backend in backends.items()
        }
        row_counts = sorted({case.num_seqs for case in sizes.cases if case.num_queries == 1})
        self._served = {
            mode: graph_runner(runner, self._pool, backends[mode], row_counts)
            for mode, runner in self._runners.items()
        }
        rates = Rates(ceilings.copy_bytes_per_s, ceilings.product_flops_per_s / 2)
        self._roofline = roofline(self._spec, Formats(dtype), rates, Formats(dtype).weight_bytes)

    def run(self) -> Iterator[Line]:
        for case in self._sizes.cases:
            yield self._case(case)

    def _case(self, case: Case) -> Line:
        line = self._roofline
        least_s = work(case, line).least_seconds(line.bytes_per_s, line.flops_per_s)
        cells: dict[str, object] = {"roofline ms": round(least_s * 1e3, 3)}
        steps: dict[str, float] = {}
        gaps_us: dict[str, float] = {}
        holds: bool | None = None
        for mode, runner in self._runners.items():
            steps[mode], device_s = self._measure(runner, case)
            cells[f"{mode} ms"] = round(steps[mode] * 1e3, 3)
            cells[f"{mode} device ms"] = round(device_s * 1e3, 3)
            if case.num_queries == 1:
                plain = self._decode(runner, case)
                by_graphs, gap_us = self._serve(mode, case)
                steps[mode] = by_graphs.step_s
                cells[f"{mode} served ms"] = round(by_graphs.step_s * 1e3, 3)
                if gap_us is not None:
                    gaps_us[mode] = cells[f"{mode} gap us"] = round(gap_us)
                if mode == Mode.EXACT:
                    holds = by_graphs.tokens == plain.tokens
            cells[f"{mode} of roofline"] = f"{least_s / steps[mode]:.0%}"
        cells["tok/s"] = round(case.num_tokens / min(steps.values()))
        if {"exact", "fast"} <= steps.keys():
            cells["fast/exact"] = round(steps["fast"] / steps["exact"], 3)
        is_decode = case.num_queries == 1
        reached = decode_step(self._name, case.num_seqs, least_s, steps, gaps_us) if is_decode else ()
        return Line(f"{self._name} {case.name}", cells, holds=holds, goals=reached)

    def _decode(self, runner: Runner, case: Case) -> Served:
        count = min(self._sizes.served_steps, case.context)
        return decode_on(runner, case, self._num_blocks, self._spec.vocab_size, count)

    def _serve(self, mode: str, case: Case) -> tuple[Served, float | None]:
        """Steps by graphs, and the microseconds that each takes beyond the device's own; the inputs of the
        last one are still there to be timed. None: there is no graph."""
        served = self._served[mode]
        found = self._decode(served.runner, case)
        replay = served.graphs.replay(case.num_seqs)
        if replay is None:
            return found, None
        with torch.inference_mode():
            device_s = self._clock.seconds(replay)  # cold: a launch that the host is late with is none of it
        return found, (found.step_s - device_s) * 1e6

    def _measure(self, runner: ModelRunner, case: Case) -> tuple[float, float]:
        """(seconds by the wall of a whole step, seconds of the device for the forward pass)."""
        plan = make_plan(case, self._num_blocks, self._spec.vocab_size, GREEDY)
        wall_s = self._clock.wall_seconds(lambda: runner.run(plan))
        batch = pack(plan.rows, CASE_BLOCK_SIZE, runner.max_model_len, self._pool.device)
        device_s = self._clock.replay_seconds(lambda: runner.decoder.forward(batch, self._pool))
        return wall_s, device_s
