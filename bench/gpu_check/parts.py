"""The parts of a check, each for a process of its own: a kernel that takes the device down takes one part.

Importing this imports kernels, so what decides how they run (the interpreter) must be set before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu_check import correctness, engine_speed, invariance, kernel_speed
from bench.gpu_check.report import Line, Part
from bench.gpu_check.timing import Ceilings, Clock, measure_ceilings
from cluster.engine.model_spec import Dtype
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


def run_part(name: str) -> Part:
    """Run it here; whatever goes wrong comes out as an exception."""
    title, make = PARTS[name]
    started_s = time.perf_counter()
    with torch.inference_mode():
        note, lines = make()
        found = tuple(lines)
    return Part(name=name, title=title, lines=found, note=note, seconds=time.perf_counter() - started_s)


def _correctness() -> tuple[str, Iterator[Line]]:
    if interpreting():
        dtypes = [torch.float32, torch.float16]
        return "bf16 is left out: the interpreter computes it wrong", correctness.run(
            TritonBackend(), dtypes, correctness.TINY
        )
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    return "", correctness.run(TritonBackend(), dtypes, correctness.REAL)


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
    "kernels": ("(c) kernels against the device's ceilings and torch", _kernel_speed),
    "engine": ("(c) the engine end to end", _engine_speed),
}
