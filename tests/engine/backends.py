"""Every backend that runs here, by name."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu.backend import CpuBackend
from kernels.ops import Backend
from kernels.reference import ReferenceBackend

BACKENDS: dict[str, Callable[[], Backend]] = {"reference": ReferenceBackend, "cpu": lambda: CpuBackend(1)}
