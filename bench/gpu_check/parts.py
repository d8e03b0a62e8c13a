"""The parts of a check, each for a process of its own: a kernel that takes the device down takes one part.

Importing this imports kernels, so what decides how they run (the interpreter) must be set before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TextIO

import msgspec
import torch

from bench.gpu_check import correctness, edge_check, engine_speed, handover, invariance, kernel_speed
from bench.gpu_check.report import Head, Line
from bench.gpu_check.timing import Ceilings, Clock, measure_ceilings
from cluster.engine.model_spec import Dtype
from cluster.kv.edges import EdgeKind
from kernels.triton.availability import interpreting
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import Mode

NO_RATES = "in the interpreter: the flow only, no rate is meant"
_BUDGET_S = 0.1  # per measured number


def device_name() -> str:
    if interpreting():
        return "the CPU, Triton's interpreter"
    major, minor = torch.cuda.get_device_capability()
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name()} ({gib:.0f} GiB, capability {major}.{minor})"


def run_part(name: str, out: TextIO) -> None:
    """Run it here and write each line as it is found; whatever goes wrong comes out as an exception."""

    def write(value: Head | Line) -> None:
        out.write(msgspec.json.encode(value).decode() + "\n")
        out.flush()

    title, make = PARTS[name]
    with torch.inference_mode():
        note, lines = make()
        write(Head(title, note))
        for line in lines:
            write(line)


def _correctness() -> tuple[str, Iterator[Line]]:
    if interpreting():
        sizes = {torch.float32: correctness.TINY, torch.float16: correctness.TINY}
        note = "bf16 is left out: the interpreter computes it wrong"
        return note, correctness.run(TritonBackend(), sizes)
    others = {torch.float32: correctness.FEWER, torch.float16: correctness.FEWER}
    return "", correctness.run(TritonBackend(), {torch.bfloat16: correctness.REAL, **others})


def _invariance() -> tuple[str, Iterator[Line]]:
    if interpreting():
        return "in fp32", invariance.run(TritonBackend(), Dtype.FP32, invariance.TINY)
    return "in bf16", invariance.run(TritonBackend(), Dtype.BF16, invariance.REAL)


def _kernel_speed() -> tuple[str, Iterator[Line]]:
    exact, fast = kernel_speed.both_modes(TritonBackend())
    clock = Clock(exact.device, _BUDGET_S)
    ceilings = measure_ceilings(clock, exact.device)
    dtype, sizes = (torch.bfloat16, kernel_speed.REAL)
    if interpreting():
        dtype, sizes = torch.float32, kernel_speed.TINY
    measure = kernel_speed.KernelSpeed(exact, fast, clock, ceilings, dtype, sizes)
    return _describe(ceilings), measure.run()


def _engine_speed() -> tuple[str, Iterator[Line]]:
    exact, fast = kernel_speed.both_modes(TritonBackend())
    clock = Clock(exact.device, 3 * _BUDGET_S)
    ceilings = measure_ceilings(clock, exact.device)
    dtype, sizes = Dtype.BF16, engine_speed.REAL
    if interpreting():
        dtype, sizes = Dtype.FP32, engine_speed.TINY
    backends = {Mode.EXACT.value: exact, Mode.FAST.value: fast}
    return _describe(ceilings), engine_speed.run(backends, clock, ceilings, dtype, sizes)


def _handover() -> tuple[str, Iterator[Line]]:
    if interpreting():
        lines = handover.check(EdgeKind.SHM, "triton", Dtype.FP32, handover.TINY)
        return "on a CPU: `shm` in place of `cuda_ipc`", _in_turn(lines)
    return "in bf16", _in_turn(handover.check(EdgeKind.CUDA_IPC, "triton", Dtype.BF16, handover.REAL))


def _edge() -> tuple[str, Iterator[Line]]:
    if interpreting():
        note = "on a CPU: `gloo` in place of `nccl`"
        return note, _in_turn(edge_check.check(EdgeKind.GLOO, edge_check.TINY))
    note = "two processes that look like two hosts, through sockets: right or wrong only, no rates"
    return note, _in_turn(edge_check.check(EdgeKind.NCCL, edge_check.REAL))


def _in_turn(lines: AsyncIterator[Line]) -> Iterator[Line]:
    """Each line when it is found. Pools made here are written by edges' threads: no inference tensors."""

    async def next_line() -> Line | None:
        return await anext(lines, None)

    with asyncio.Runner() as runner:
        while True:
            with torch.inference_mode(False):
                line = runner.run(next_line())
            if line is None:
                return
            yield line


def _describe(ceilings: Ceilings) -> str:
    if interpreting():
        return NO_RATES
    return (
        f"ceilings of this run: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s read and written, "
        f"product {ceilings.product_flops_per_s / 1e12:.0f} TFLOP/s"
    )


PARTS: dict[str, tuple[str, Callable[[], tuple[str, Iterator[Line]]]]] = {
    "correctness": ("(a) kernels against the reference", _correctness),
    "invariance": ("(b) a row's bits are its own", _invariance),
    "handover": ("(c) prefill and decode in two processes", _handover),
    "edge": ("(d) an edge between two hosts", _edge),
    "kernels": ("(e) kernels against the device's ceilings and torch", _kernel_speed),
    "engine": ("(e) the engine end to end", _engine_speed),
}
