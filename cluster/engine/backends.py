"""From a backend's name in the configuration to the backend. Each is imported only when it is asked for."""

from __future__ import annotations

from cluster.config import BackendName
from kernels.ops import Backend


def make_backend(name: BackendName, num_threads: int) -> Backend:
    """The CPU backend compiles its kernels here when it runs for the first time."""
    if name == "cpu":
        from kernels.cpu.backend import CpuBackend

        return CpuBackend(num_threads)
    from kernels.reference import ReferenceBackend

    return ReferenceBackend()
