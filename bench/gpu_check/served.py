"""Decode steps as a worker runs them: by graphs, each row going on with the token it got.

1. `graph_runner` captures the steps of given numbers of rows, as a worker does when it starts.
2. `decode_on` runs the last steps up to a case's context on any runner. By the wall a step is the launch of
   its graph, the device's time, the tokens' way to the host, and the plan of the step that follows at once;
   its inputs were prepared during the step before. What it takes beyond the device's time for the same graph
   is the host's gap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from bench.engine_cases import Case, make_plan
from cluster.engine.batch import Runner, StepPlan
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.following import following_plan
from cluster.engine.gpu_runner import GpuRunner
from cluster.engine.graph_capture import CudaCapture, eager
from cluster.engine.runner import ModelRunner
from cluster.ids import BlockId
from cluster.sampling import SamplingParams
from kernels.ops import Backend

GREEDY = SamplingParams(max_tokens=2**20, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Served:
    tokens: list[list[int]]  # of each step, one per row
    step_s: float  # median by the wall, without the first


@dataclass(frozen=True, slots=True)
class Captured:
    """`num_captured`: `DrawKind`s for each number of rows, unless one could not be."""

    runner: GpuRunner
    graphs: DecodeGraphs
    num_captured: int


def graph_runner(runner: ModelRunner, pool: Tensor, backend: Backend, sizes: Sequence[int]) -> Captured:
    """`sizes`: numbers of rows, ascending. `pool` is that of `runner`; its last block is for padding."""
    device = backend.device
    with torch.inference_mode():
        sampler = backend.make_device_sampler(sizes[-1], runner.decoder.spec.vocab_size)
        assert sampler is not None, "a vocabulary of these shapes is not too large"
        scratch = BlockId(pool.shape[0] - 1)
        inputs = DecodeInputs(sizes[-1], runner.max_model_len, pool.shape[3], scratch, device)
        graphs = DecodeGraphs(runner.decoder, pool, sampler, inputs, sizes)
        num_captured = graphs.capture(CudaCapture(device) if device.type == "cuda" else eager)
    return Captured(GpuRunner(runner, graphs, device), graphs, num_captured)


def decode_on(runner: Runner, case: Case, num_blocks: int, vocab_size: int, num_steps: int) -> Served:
    """The last `num_steps` steps that end at the context of `case`, a case of decode rows."""
    start = case.context - num_steps
    rows = make_plan(case, num_blocks, vocab_size, GREEDY).rows
    plan: StepPlan | None = StepPlan(tuple(msgspec.structs.replace(row, start=start) for row in rows))
    tokens: list[list[int]] = []
    seconds: list[float] = []
    for _ in range(num_steps):
        assert plan is not None, "no row ends before the last step"
        began_s = time.perf_counter()
        output = runner.run(plan)
        plan = following_plan(plan, output)
        seconds.append(time.perf_counter() - began_s)
        tokens.append([one.token_id for one in output.outputs if one is not None])
    return Served(tokens, statistics.median(seconds[1:] or seconds))
