"""What this machine can do at most, measured by the kernels' own library: the yardstick of `bench.engine`."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from kernels.cpu.build import load_library
from kernels.cpu.native import bind

READ_BYTES = 256 * 2**20  # far more than any cache
ROUNDS = 200_000  # of ten vectors of multiply-adds: about a millisecond
REPEATS = 5


class MachineProbe:
    """Short measurements on `num_threads` threads; each call gives the best of several."""

    def __init__(self, num_threads: int) -> None:
        """Raises:
        BuildError: the library cannot be compiled or loaded here.
        """
        self._library = bind(load_library())
        self._num_threads = num_threads
        # on huge pages where the system has any, as weights and KV are
        memory = mmap.mmap(-1, READ_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._data = torch.frombuffer(memory, dtype=torch.float32).fill_(1)

    def measure(self) -> tuple[float, float]:
        """(bytes read per second, multiply-adds per second: of bf16 pairs if the CPU has them, else fp32)."""
        library, threads, data = self._library, self._num_threads, self._data
        reads = [library.baton_probe_read(data.data_ptr(), data.numel(), threads) for _ in range(REPEATS)]
        return max(reads), self._best(library.baton_probe_multiply_adds)

    def fp32_multiply_adds_per_s(self) -> float:
        return self._best(self._library.baton_probe_fp32_multiply_adds)

    def byte_multiply_adds_per_s(self) -> float:
        """Of bytes, summed in 32 bits."""
        return self._best(self._library.baton_probe_byte_multiply_adds)

    def _best(self, rate: Callable[[int, int], float]) -> float:
        return max(rate(ROUNDS, self._num_threads) for _ in range(4 * REPEATS))
