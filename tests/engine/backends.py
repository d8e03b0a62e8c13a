"""Every backend that runs here, by name."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu.backend import CpuBackend
from kernels.ops import Backend
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend

BACKENDS: dict[str, Callable[[], Backend]] = {"reference": ReferenceBackend, "cpu": lambda: CpuBackend(1)}
QUANTIZED: dict[str, Callable[[], Backend]] = {
    "reference-int8": lambda: ReferenceBackend("cpu", Quantization.INT8),
    "cpu-int8": lambda: CpuBackend(1, Quantization.INT8),
    "cpu-int8-weights": lambda: CpuBackend(1, Quantization.INT8_WEIGHTS),
}
